"""Reads, writes and downloads model files in the safetensors format."""
