"""Stages, devices and the executor (layer 4): one training step."""
