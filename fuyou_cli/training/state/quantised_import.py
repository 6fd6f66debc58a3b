"""Quantises a checkpoint's tensors while they are read, piece by piece, into the bytes that bitsandbytes makes of them. Those
of a checkpoint that it has quantised are taken as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ...core.errors import UsageError
from ...engine.compute_weights import part
from ...spec.model import Dtype, StageSpec
from ...spec.packed_tensors import NF4_BLOCK, READ_ONLY, PackedTensor, Quantised
from ...swap.kernels import Workers, dynamic_encode, int8_encode, nf4_encode
from ..packed_reading import Read

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
