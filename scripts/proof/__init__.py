"""Holds what the proof scripts share: limits and what the kernel counts, rows and models, runs of both sides, tables."""
