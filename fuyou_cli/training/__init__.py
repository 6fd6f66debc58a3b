"""Layer 6: the run: from a recipe to a plan, the loop, its state on disk and its report."""
