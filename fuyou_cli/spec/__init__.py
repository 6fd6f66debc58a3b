"""Layer 1: plain data about the model, the machine and the plan. Imports no torch."""
