"""Holds `fuyou quickstart`: a toy model, a text about invented islands, the public commands, and one screen."""
