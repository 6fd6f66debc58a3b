"""Plan a recipe, and say what to change when it does not fit (layer 7)."""
