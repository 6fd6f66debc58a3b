"""Errors, units and readers of files (layer 0). Imports nothing else of fuyou."""
