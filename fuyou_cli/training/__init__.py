"""Trains (layer 6): from a recipe to a plan, the loop, its state on disk and its report."""
