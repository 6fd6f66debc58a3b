"""Runs commands and renders their output (layer 8)."""
