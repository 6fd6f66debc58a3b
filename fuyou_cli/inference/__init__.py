"""Holds what uses a model without training it: losses on a recipe's sets, prompts, and lm-evaluation-harness."""
