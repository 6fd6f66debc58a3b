"""Reads the user's recipe (layer 1): a recipe is data, checked without torch, and every error names its place."""
