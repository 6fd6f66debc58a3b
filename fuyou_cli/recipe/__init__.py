"""Layer 1: the recipe, what a person wants. Imports no torch."""
