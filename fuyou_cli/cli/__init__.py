"""Layer 6: commands, rendering, probing the machine."""
