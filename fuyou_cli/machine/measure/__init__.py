"""Measures the rates that plans are made with."""
