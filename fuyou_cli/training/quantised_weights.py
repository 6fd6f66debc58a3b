"""Quantises and decodes weights, piece by piece: tensors of a checkpoint while they are imported, into the bytes that
bitsandbytes makes of them, and parts of a quantised tensor that rests in a store or in a checkpoint's files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..checkpoint.quantised_files import reads_parts
from ..core.errors import UsageError
from ..core.units import align_up
from ..engine.compute_weights import part
from ..spec.model import ITEM_SIZE, Dtype, StageSpec
from ..spec.packed_tensors import FP8_BLOCK, MXFP4_BLOCK, NF4_BLOCK, READ_ONLY, PackedTensor, Quantised, packed_bank
from ..swap.kernels import (
    Workers,
    dynamic_decode,
    dynamic_encode,
    fp8_decode,
    int8_decode,
    int8_encode,
    mxfp4_decode,
    nf4_decode,
    nf4_encode,
)

if TYPE_CHECKING:
    from ..checkpoint.reader import TensorEntry, TensorReader

_PIECE = 1 << 22  # bytes read at once
_DECODED = 1 << 21  # elements decoded at once: no more than a store's window holds
_TURNED = 8  # blocks of mxfp4 in a row that are turned at once

# Reads bytes of a part of the tensor, given as the part's place and size, and the range in it. Valid until the next call.
Read = Callable[[tuple[int, int], int, int], memoryview]


class PackedReader:
    """Reads one tensor: its maxima at once, an eighth of its bytes at most, and then codes as they are asked for. Of
    mxfp4, whose matrices rest transposed, those of one matrix stay."""

    def __init__(self, kind: Quantised, at: PackedTensor, read: Read, dtype: Dtype) -> None:
        self._kind, self._at, self._read, self._dtype = kind, at, read, dtype
        self._matrix: tuple[int, Any, Any] = (-1, None, None)
        if kind == "mxfp4":
            return
        mean, outer, maxima = (self._whole(part, 0, part[1]) for part in (at.mean, at.outer, at.maxima))
        self._maxima: Any = np.frombuffer(maxima, np.float32) if kind != "nf4_double" else None
        if kind == "nf4_double":
            self._maxima = np.empty(at.blocks, np.float32)
            dynamic_decode(maxima, outer, self._maxima, offset=float(np.frombuffer(mean, np.float32)[0]))

    def _whole(self, part: tuple[int, int], first: int, last: int) -> bytearray:
        whole = bytearray()
        for begin in range(first, last, _PIECE):
            whole += self._read(part, begin, min(begin + _PIECE, last))
        return whole

    def elements(self, first: int, count: int) -> memoryview:
        """Returns elements [first, first + count) of the model's tensor as bytes of the compute dtype."""
        if self._kind == "mxfp4":
            return self._transposed(first, count)
        at, unit = self._at, self._at.columns if self._kind in ("int8", "fp8") else NF4_BLOCK
        begin, end = first // unit * unit, min(align_up(first + count, unit), at.numel)
        item, maxima = ITEM_SIZE[self._dtype], self._maxima[begin // unit : -(-end // unit)]
        values = np.empty((end - begin) * item, np.uint8)
        if self._kind == "int8":
            int8_decode(self._read(at.codes, begin, end), maxima, at.columns, values.data, self._dtype)
        elif self._kind == "fp8":
            self._squares(begin // unit, self._read(at.codes, begin, end), values.data)
        else:
            nf4_decode(self._read(at.codes, begin // 2, (end + 1) // 2), maxima, values.data, self._dtype)
        return values.data[(first - begin) * item : (first + count - begin) * item]

    def _squares(self, first: int, codes: memoryview, values: memoryview) -> None:
        """Decodes rows from `first` on, those of the same squares at once."""
        columns, across = self._at.columns, -(-self._at.columns // FP8_BLOCK)
        size, row, end = columns * ITEM_SIZE[self._dtype], first, first + len(codes) // columns
        while row < end:
            band = row // FP8_BLOCK
            upto = min((band + 1) * FP8_BLOCK, end)
            scales = self._maxima[band * across : (band + 1) * across]
            here, there = (slice((row - first) * of, (upto - first) * of) for of in (columns, size))
            fp8_decode(codes[here], scales, columns, values[there], self._dtype)
            row = upto

    def _transposed(self, first: int, count: int) -> memoryview:
        """Decodes the blocks that hold these elements, matrix by matrix, and turns them."""
        inputs, rows = self._at.shape[-2:]
        size, item, done = inputs * rows, np.dtype(f"u{ITEM_SIZE[self._dtype]}"), 0
        values = np.empty(count, item)
        while done < count:
            at = first + done
            matrix, begin = divmod(at, size)
            block = begin // (rows * MXFP4_BLOCK)
            end = min(begin + count - done, size, (block + _TURNED) * MXFP4_BLOCK * rows)
            last = -(-end // (rows * MXFP4_BLOCK))
            codes, exponents = self._codes(matrix)
            decoded: Any = np.empty((rows, (last - block) * MXFP4_BLOCK), item)
            packed: Any
            powers: Any
            packed, powers = (np.ascontiguousarray(one[:, block:last]).reshape(-1) for one in (codes, exponents))
            mxfp4_decode(packed, powers, decoded.reshape(-1), self._dtype)
            skipped = begin - block * MXFP4_BLOCK * rows
            values[done : done + end - begin] = decoded.T.reshape(-1)[skipped : skipped + end - begin]
            done += end - begin
        return values.view(np.uint8).data

    def _codes(self, matrix: int) -> tuple[Any, Any]:
        """Returns codes and exponents of one matrix, in rows of blocks."""
        if self._matrix[0] != matrix:
            inputs, rows = self._at.shape[-2:]
            blocks = inputs * rows // MXFP4_BLOCK
            parts = [
                np.frombuffer(self._whole(part, matrix * size, (matrix + 1) * size), np.uint8)
                for part, size in ((self._at.codes, blocks * MXFP4_BLOCK // 2), (self._at.maxima, blocks))
            ]
            across = inputs // MXFP4_BLOCK
            self._matrix = matrix, parts[0].reshape(rows, across, MXFP4_BLOCK // 2), parts[1].reshape(rows, across)
        return self._matrix[1:]


class DecodingReader:
    """Reads a checkpoint's tensors in the compute dtype. Quantised ones are decoded."""

    def __init__(self, reader: TensorReader, dtype: Dtype) -> None:
        self._reader, self._dtype = reader, dtype
        self._last: tuple[TensorEntry, PackedReader] | None = None

    def read_into(self, entry: TensorEntry, into: torch.Tensor, *, first: int) -> None:
        """Fills `into` (1-D) with elements from `first` on."""
        if entry.scales is None:
            self._reader.read_into(entry, into, first_element=first)
            return
        for begin in range(0, into.numel(), _DECODED):
            part = into[begin : begin + _DECODED]
            part.view(torch.uint8).numpy().data[:] = self.read(entry, first + begin, part.numel())

    def read(self, entry: TensorEntry, first: int, count: int) -> memoryview:
        """Returns elements [first, first + count) of a quantised tensor as bytes of the dtype."""
        assert entry.scales is not None
        if self._last is None or self._last[0] is not entry:
            at = packed_bank(entry.scales.kind, [(entry.name, entry.shape)])[0][entry.name]
            self._last = entry, PackedReader(entry.scales.kind, at, reads_parts(entry, at, self._reader), self._dtype)
        return self._last[1].elements(first, count)


# ---- quantising -------------------------------------------------------------------------------------------------------

PIECE = 1 << 22  # elements that are quantised at once, whole blocks of nf4; of int8 the whole rows in as many

# Yields a tensor of the checkpoint in the compute dtype, as 1-D pieces of so many elements from its beginning.
Pieces = Callable[[str, int], Iterator[torch.Tensor]]
Packed = Callable[[str, PackedTensor], Read | None]  # what reads the parts of a tensor that the checkpoint has quantised


def quantise(
    stage: StageSpec,
    bank: torch.Tensor,
    pieces: Pieces,
    packed: Packed = lambda name, at: None,
    *,
    dtype: Dtype,
    workers: Workers,
) -> None:
    """Fills a stage's `bank` (bytes) with its quantised tensors. Raises UsageError for a value that the format has not."""
    bank.zero_()
    kind = stage.quantisation
    assert kind is not None
    for name, at in stage.packed().items():
        if (read := packed(name, at)) is not None:
            _copy(bank, at, read)
            continue
        try:
            if kind in READ_ONLY:
                raise UsageError("the checkpoint has it not so, and fuyou does not make this format", hint="name nf4 or int8")
            if kind == "int8":
                _rows(bank, at, pieces(name, max(1, PIECE // at.columns) * at.columns), workers)
            else:
                _blocks(kind, bank, at, pieces(name, PIECE), dtype, workers)
        except UsageError as error:
            raise UsageError(f"model.quantize: {kind}: {name}: {error.message}", hint=error.hint) from None


def _copy(bank: torch.Tensor, at: PackedTensor, read: Read) -> None:
    """Copies all parts of a tensor, byte for byte."""
    target = bank.numpy()
    for place in (at.mean, at.outer, at.maxima, at.codes):
        for begin in range(0, place[1], PIECE):
            end = min(begin + PIECE, place[1])
            target[place[0] + begin : place[0] + end] = np.frombuffer(read(place, begin, end), np.uint8)


def _rows(bank: torch.Tensor, at: PackedTensor, pieces: Iterator[torch.Tensor], workers: Workers) -> None:
    """Quantises to int8 what float16 has of the values, as bitsandbytes does."""
    codes, maxima, begin = part(bank, at.codes, torch.uint8), part(bank, at.maxima, torch.float32), 0
    for piece in pieces:
        values, end = piece.to(torch.float16).float(), begin + piece.numel()
        rows = slice(begin // at.columns, end // at.columns)
        int8_encode(_array(values), at.columns, "float32", _array(codes[begin:end]), _array(maxima[rows]), workers=workers)
        begin = end


def _blocks(
    kind: Quantised, bank: torch.Tensor, at: PackedTensor, pieces: Iterator[torch.Tensor], dtype: Dtype, workers: Workers
) -> None:
    codes, begin = part(bank, at.codes, torch.uint8), 0
    maxima = torch.empty(at.blocks) if kind == "nf4_double" else part(bank, at.maxima, torch.float32)
    for piece in pieces:
        end = begin + piece.numel()
        blocks = maxima[begin // NF4_BLOCK : -(-end // NF4_BLOCK)]
        nf4_encode(_array(piece), dtype, _array(codes[begin // 2 : (end + 1) // 2]), _array(blocks), workers=workers)
        begin = end
    if kind == "nf4_double":
        mean = maxima.mean()  # torch's own sum: bitsandbytes' bits
        part(bank, at.mean, torch.float32)[0] = mean
        maxima -= mean
        dynamic_encode(_array(maxima), _array(part(bank, at.maxima, torch.uint8)), _array(part(bank, at.outer, torch.uint8)))


def _array(values: torch.Tensor) -> Any:
    found: np.ndarray[Any, Any] = values.view(torch.uint8).numpy()
    return found
