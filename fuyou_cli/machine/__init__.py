"""Finds out what this machine has and how fast it is (layer 6): probes, measures, keeps and describes it."""
