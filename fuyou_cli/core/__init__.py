"""Layer 0: errors and units. Imports nothing of ours."""
