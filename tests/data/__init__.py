"""Tests data: reading, formats, packing, sampling and batches."""
