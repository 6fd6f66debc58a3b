"""Holds plain data about the model, the machine and the plan (layer 1). Imports no torch."""
