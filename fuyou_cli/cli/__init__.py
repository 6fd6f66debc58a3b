"""Layer 8: commands and rendering."""
