"""Layer 4: stages, devices and the executor: one training step."""
