"""Tells what this machine is and how fast (layer 6): probed, measured, kept, described."""
