"""Layer 6: what this machine is and how fast: probed, measured, kept, described."""
