"""Plans a recipe and says what to change if it does not fit (layer 7)."""
