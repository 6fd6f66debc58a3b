"""Tensors of a whole batch, in memory of their own.

They stay while the blocks of every micro-batch come and go. In the heap one of them holds all that was freed below it: a hole
of a hundred MiB, from which a head's logits were then taken that ought to be mapped and to go back to the system when freed.
"""

from __future__ import annotations

import math
import mmap

import torch

_SMALL = 1 << 20  # bytes: fewer are not worth the page faults


def whole_batch(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in host memory, zeros or anything; given back whole once the last view of it is gone."""
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALL:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype).view(shape)
