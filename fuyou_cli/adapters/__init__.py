"""Puts peft's LoRA layers into a skeleton, names what they hold as peft does, and merges them into weights."""
