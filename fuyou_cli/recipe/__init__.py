"""Reads what the user asks for (layer 1): a recipe is data, checked without torch, and every error names its place."""
