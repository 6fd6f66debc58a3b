"""Layer 7: plans a recipe, and says what to change when it does not fit."""
