"""Reads and writes model files: safetensors headers, shards, names, streamed reading and writing, and the hub."""
