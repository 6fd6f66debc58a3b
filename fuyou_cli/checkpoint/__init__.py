"""Model files in and out: safetensors headers, shards, names, streamed reading and writing, and the hub."""
