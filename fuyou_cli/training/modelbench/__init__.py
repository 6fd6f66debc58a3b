"""Measures runs of a model's shape without its weights or data, for `fuyou bench --model`."""
