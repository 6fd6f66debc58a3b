"""A mark of a checkpoint's weights that costs a few small reads per tensor, however large the model is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from .header import TensorEntry
from .reader import TensorReader

SAMPLES = 4  # places of a tensor that are looked at, its beginning and its end among them
SAMPLE = 1024  # bytes of each


def weights_mark(entries: Mapping[str, TensorEntry]) -> str:
    """A digest of every tensor's name, dtype, shape and some of its bytes. Two checkpoints that were trained apart differ in
    some of them; one that was copied, moved or sharded anew does not. Raises UsageError where a file cannot be read."""
    digest = hashlib.sha256()
    with TensorReader() as reader:
        for name, entry in sorted(entries.items()):
            digest.update(json.dumps([name, entry.dtype, entry.shape]).encode())
            for place in range(SAMPLES):
                length = min(SAMPLE, entry.nbytes)
                digest.update(reader.read_some(entry, (entry.nbytes - length) * place // (SAMPLES - 1), length))
    return digest.hexdigest()
