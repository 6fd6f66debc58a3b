"""Layer 5: data, checkpoints in and out, the training loop and its report."""
