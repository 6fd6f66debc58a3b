"""Decodes parts of a quantised tensor that rests in a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.units import align_up
from ..spec.model import ITEM_SIZE, Dtype
from ..spec.packed_tensors import NF4_BLOCK, PackedTensor, Quantised
from ..swap.quantised import dynamic_decode, int8_decode, nf4_decode

_PIECE = 1 << 22  # bytes read at once

# Reads bytes of a part of the tensor, given as the part's place and size, and the range in it. Valid until the next call.
Read = Callable[[tuple[int, int], int, int], memoryview]


class PackedReader:
    """Reads one tensor: its maxima at once, an eighth of its bytes at most, and then codes as they are asked for."""

    def __init__(self, kind: Quantised, at: PackedTensor, read: Read, dtype: Dtype) -> None:
        self._kind, self._at, self._read, self._dtype = kind, at, read, dtype
        mean, outer, maxima = (self._whole(part) for part in (at.mean, at.outer, at.maxima))
        self._maxima: Any = np.frombuffer(maxima, np.float32) if kind != "nf4_double" else None
        if kind == "nf4_double":
            self._maxima = np.empty(at.blocks, np.float32)
            dynamic_decode(maxima, outer, self._maxima, offset=float(np.frombuffer(mean, np.float32)[0]))

    def _whole(self, part: tuple[int, int]) -> bytearray:
        whole = bytearray()
        for begin in range(0, part[1], _PIECE):
            whole += self._read(part, begin, min(begin + _PIECE, part[1]))
        return whole

    def elements(self, first: int, count: int) -> memoryview:
        """Returns elements [first, first + count) as bytes of the compute dtype."""
        at, unit = self._at, self._at.columns if self._kind == "int8" else NF4_BLOCK
        begin, end = first // unit * unit, min(align_up(first + count, unit), at.numel)
        item, maxima = ITEM_SIZE[self._dtype], self._maxima[begin // unit : -(-end // unit)]
        values = np.empty((end - begin) * item, np.uint8)
        if self._kind == "int8":
            int8_decode(self._read(at.codes, begin, end), maxima, at.columns, values.data, self._dtype)
        else:
            nf4_decode(self._read(at.codes, begin // 2, (end + 1) // 2), maxima, values.data, self._dtype)
        return values.data[(first - begin) * item : (first + count - begin) * item]
