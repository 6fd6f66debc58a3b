"""Measures runs of a model's shapes without its weights or data: what `fuyou bench --model` shows."""
