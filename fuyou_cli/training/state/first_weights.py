"""Fills memory with what a stage's parameters begin with: a checkpoint's tensors, and what an adapter begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from ...checkpoint.header import TensorEntry
from ...checkpoint.quantised_files import reads_parts
from ...checkpoint.reader import TensorReader
from ...core.errors import UsageError
from ...engine.skeleton import TORCH_DTYPE
from ...spec.model import Dtype, StageSpec
from ...spec.packed_tensors import PackedTensor
from ...swap.kernels import Workers, split, sum_squares
from ..packed_reading import DecodingReader, PackedReader, Read
from .quantised_import import quantise

_PIECE = 1 << 22  # elements of a checkpoint that are converted at once

Pieces = Callable[[str], Iterator[torch.Tensor]]
# Gives the values of those of the names that no checkpoint has. It may ask for pieces of a tensor that a checkpoint has.
Added = Callable[[Iterable[str], Pieces], Mapping[str, torch.Tensor]]


class FirstWeights:
    """Reads the first weights of one stage after the other."""

    def __init__(self, entries: Mapping[str, TensorEntry], reader: TensorReader, added: Added, *, dtype: Dtype) -> None:
        self._entries, self._reader, self._added_to, self._dtype = entries, reader, added, dtype
        self._decoding = DecodingReader(reader, dtype)
        self._added: Mapping[str, torch.Tensor] = {}
        self._packed: tuple[StageSpec, torch.Tensor] | None = None

    def begin(self, stage: StageSpec) -> bool:
        """Makes `fill` ready for a stage. Tells whether its trained values fit the compute dtype without a remainder. What an
        adapter begins with depends on the weights as they are computed with, so quantised ones come first."""
        self._added = self._added_to([tensor.name for tensor in stage.tensors], self._computed)
        trained = (tensor.name for tensor in stage.trained_tensors if tensor.name not in self._added)
        return self._dtype == "float32" or all(_narrow(self._entries[name]) for name in trained)

    def fill(self, stage: StageSpec, begin: int, weights: torch.Tensor, rest: torch.Tensor | None) -> None:
        """Reads elements of the stage from `begin` on, as many as `weights` holds, with zeros between tensors. rest:
        remainders of trained ones."""
        end = begin + weights.numel()
        weights.zero_()
        if rest is not None:
            rest.zero_()
        for tensor in stage.tensors:
            first, last = max(begin, tensor.offset), min(end, tensor.offset + tensor.numel)
            if first >= last:
                continue
            here, skipped = slice(first - begin, last - begin), tensor.first + first - tensor.offset
            if tensor.name in self._added:
                weights[here] = self._added[tensor.name].view(-1)[skipped : skipped + last - first]
            elif rest is None or tensor.frozen or self._entries[tensor.name].scales is not None:
                self._read(self._entries[tensor.name], weights[here], first=skipped)
            else:
                self._read_split(self._entries[tensor.name], weights[here], rest[here], first=skipped)

    def fill_quantised(self, stage: StageSpec, bank: torch.Tensor, *, workers: Workers) -> None:
        """Reads the tensors of the stage that rest quantised into their `bank` (bytes), and quantises those that are not."""
        firsts = {tensor.name: tensor.first for tensor in stage.tensors}

        def parts(name: str, at: PackedTensor) -> Read | None:
            """Returns what reads the parts of a tensor that the checkpoint has quantised; None for any other."""
            entry = self._entries[name]
            return None if entry.scales is None else reads_parts(entry, at, self._reader, first=firsts[name])

        quantise(stage, bank, self._pieces, parts, dtype=self._dtype, workers=workers)
        self._packed = stage, bank

    def _computed(self, name: str) -> Iterator[torch.Tensor]:
        """Yields the same pieces of what is computed with: of a tensor that rests quantised, the decoded values."""
        stage, bank = self._packed or (None, None)
        if stage is None or bank is None or stage.quantisation is None or name not in (packed := stage.packed()):
            yield from self._pieces(name)
            return
        at, held = packed[name], bank.numpy().data
        reader = PackedReader(
            stage.quantisation, at, lambda part, begin, end: held[part[0] + begin : part[0] + end], self._dtype
        )
        for begin in range(0, at.numel, _PIECE):
            values = reader.elements(begin, min(_PIECE, at.numel - begin))
            yield torch.frombuffer(values, dtype=TORCH_DTYPE[self._dtype])

    def _pieces(self, name: str, most: int = _PIECE) -> Iterator[torch.Tensor]:
        """Yields a tensor of the checkpoint in the compute dtype, as 1-D pieces of `most` elements from its beginning."""
        entry = self._entries[name]
        piece = torch.empty(min(most, entry.numel), dtype=TORCH_DTYPE[self._dtype])
        for begin in range(0, entry.numel, most):
            part = piece[: min(most, entry.numel - begin)]
            self._read(entry, part, first=begin)
            yield part

    def _read(self, entry: TensorEntry, values: torch.Tensor, *, first: int) -> None:
        """Reads elements from `first` on. Raises UsageError for NaN or Inf: otherwise they would look like a fault of the
        learning rate later."""
        self._decoding.read_into(entry, values, first=first)
        nonfinite = sum_squares(values.view(torch.uint8).numpy().data, self._dtype)[1]
        if nonfinite:
            raise _damaged(entry, nonfinite, "not finite")

    def _read_split(self, entry: TensorEntry, weights: torch.Tensor, remainder: torch.Tensor, *, first: int) -> None:
        """Splits elements of a tensor wider than bfloat16, from `first` on, into weights and remainder, piece by piece."""
        piece = torch.empty(min(_PIECE, weights.numel()), dtype=torch.float32)
        for begin in range(0, weights.numel(), _PIECE):
            count = min(_PIECE, weights.numel() - begin)
            self._reader.read_into(entry, piece[:count], first_element=first + begin)
            nonfinite = split(
                piece[:count].numpy().data,
                weights[begin : begin + count].view(torch.int16).numpy().data,
                remainder[begin : begin + count].numpy().data,
            )
            if nonfinite:
                raise _damaged(entry, nonfinite, "not finite in bfloat16")


def _narrow(entry: TensorEntry) -> bool:
    """Tells whether bfloat16 has all that is read of a tensor. What is decoded is rounded to it once."""
    return entry.scales is not None or entry.dtype == "bfloat16"


def _damaged(entry: TensorEntry, count: int, what: str) -> UsageError:
    values = "1 value" if count == 1 else f"{count:,} values"
    return UsageError(
        f"{entry.file}: {values} of {entry.name} {'is' if count == 1 else 'are'} {what}",
        hint="the checkpoint is damaged: download it again, or use an earlier one",
    )
