"""Data: reading, formats, packing, sampling and batches."""
