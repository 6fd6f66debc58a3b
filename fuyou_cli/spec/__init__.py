"""Holds plain data about the model, the machine and the plan (layer 1). Does not import torch."""
