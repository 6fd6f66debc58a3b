"""Run commands and render what they say (layer 8)."""
