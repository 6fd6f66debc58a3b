"""Layer 1: what the user asks for. A recipe is data: it is checked without torch, and every error names its place."""
