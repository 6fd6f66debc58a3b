"""Layer 0: errors, units, and sums of disk space. Imports nothing of ours."""
