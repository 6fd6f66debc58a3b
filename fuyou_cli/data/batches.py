"""Deals rows to micro-batches by their length, and lays them out as the arrays of a step.

Rows of unlike length are the usual case. A model whose attention can keep documents apart gets them end to end (`padding` of
the numerics is none): nothing lies between them. Any other gets them by length, each micro-batch as wide as its longest row.
Widths come from a small set (`width_step`), because libraries compile and keep code for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fuyou_cli.core.units import align_up
from fuyou_cli.spec.plan import Computed, MicroBatch, Numerics, TypicalStep

from .rows import NO_LOSS, RowSource

if TYPE_CHECKING:
    import torch

_DRAWN, _DRAWN_ROWS = 33, 2048  # steps that a typical one is the mean of, at least, and their rows
_MOST_ROWS = 1 << 18  # of these steps together, unless one has more

Dealt = list[list[int]]  # rows of each micro-batch, as places in a list of rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Says where a row lies in a batch."""

    row: int
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Holds rows as arrays. Labels are aligned with `input_ids`; the loss shifts them, so no first token's is used."""

    input_ids: NDArray[np.int64]  # [R, W]
    labels: NDArray[np.int64]  # [R, W], NO_LOSS where a label does not count
    tokens: int  # without padding
    label_tokens: int  # labels that count, of tokens that are not the first of a row
    documents: list[list[int]] | None  # tokens of each row's documents, its padding last; None: not kept apart
    sweeps: tuple[tuple[MicroBatch, ...], ...] | None  # micro-batches of each sweep; None: all are as wide as the array
    places: tuple[Place, ...]  # of the rows, in the order in which they were asked for

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (input_ids, labels) as torch tensors that share this batch's memory."""
        import torch

        return torch.from_numpy(self.input_ids), torch.from_numpy(self.labels)

    def real(self) -> torch.Tensor | None:
        """Returns which tokens are no padding, bool [R, W]; None: all that are computed."""
        import torch

        if self.tokens == self.computed:
            return None
        real = np.zeros(self.input_ids.shape, np.bool_)
        for place in self.places:
            real[place.row, place.begin : place.end] = True
        return torch.from_numpy(real)

    @property
    def computed(self) -> int:
        """Returns the tokens that are computed, with padding."""
        if self.sweeps is None:
            return self.input_ids.size
        return sum(part.tokens for parts in self.sweeps for part in parts)


class Sequences:
    """Gives lists of tokens as rows. `scored`: how many of the last tokens of each are labels; none without it."""

    def __init__(self, sequences: Sequence[Sequence[int]], scored: Sequence[int] | None = None) -> None:
        self._sequences, self._scored = sequences, scored

    def tokens(self, index: int) -> NDArray[np.int32]:
        return np.asarray(self._sequences[index], np.int32)

    def mask(self, index: int) -> NDArray[np.uint8]:
        mask = np.zeros(len(self._sequences[index]), np.uint8)
        if self._scored is not None:
            mask[len(mask) - self._scored[index] :] = 1
        return mask

    def documents(self, index: int) -> None:
        return None


# ---- dealing ---------------------------------------------------------------------------------------------------------


def deal(lengths: Sequence[int], numerics: Numerics, *, most: int | None = None) -> Iterator[Dealt]:
    """Deals rows of these lengths to micro-batches, the longest first. Yields one pass, or as many as it takes to have at most
    `most` micro-batches in each.

    A micro-batch has room for `micro_batch_size` rows of `max_seq_len` tokens; rows laid end to end share it (first fit).
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    apart = numerics.padding == "none"
    dealt: Dealt = []
    left: list[int] = []  # room of each micro-batch: tokens where rows lie end to end, else rows
    for number in order:
        size = lengths[number] if apart else 1
        # Rows of a length stay together where each micro-batch has its own: only the newest takes more.
        open_from = 0 if apart else max(0, len(left) - 1)
        place = next((place for place in range(open_from, len(left)) if left[place] >= size), None)
        if place is None:
            if most is not None and len(dealt) == most:
                yield dealt
                dealt, left = [], []
            place = len(dealt)
            dealt.append([])
            left.append(numerics.micro_batch_tokens if apart else numerics.micro_batch_size)
        dealt[place].append(number)
        left[place] -= size
    if dealt:
        yield dealt


def _width(lengths: Sequence[int], numerics: Numerics) -> int:
    """Returns the width of a micro-batch of rows of these lengths."""
    tokens = max(1, sum(lengths)) if numerics.padding == "none" else max(lengths)  # of an empty one there is padding alone
    return min(align_up(tokens, numerics.width_step), numerics.widest)


def typical_step(lengths: Sequence[int], numerics: Numerics) -> TypicalStep | None:
    """Returns the mean of some steps that are drawn from rows of these lengths: the one nearest to it, with its micro-batches
    made as much longer or shorter. So micro-batches of any size are compared on the same rows. None if all rows are whole."""
    if numerics.padding == "step" or min(lengths) == numerics.max_seq_len:
        return None
    drawn = max(_DRAWN, _DRAWN_ROWS // numerics.batch_size), numerics.batch_size
    if drawn[0] * drawn[1] > _MOST_ROWS:  # the mean of so many rows needs fewer steps
        drawn = max(1, _MOST_ROWS // drawn[1]), drawn[1]
    order = np.random.Generator(np.random.Philox(_DRAWN)).integers(0, len(lengths), drawn)
    steps = []
    for chosen in order.tolist():
        of_step = [lengths[number] for number in chosen]
        parts = []
        for micro in next(deal(of_step, numerics)):
            of_rows = [of_step[number] for number in micro]
            width = _width(of_rows, numerics)
            if numerics.padding == "none":  # a token attends to its own document
                attended = sum(length * length for length in of_rows) // sum(of_rows)
                parts.append(Computed(tokens=width, width=attended, rows=len(micro)))
            else:
                parts.append(Computed(tokens=len(micro) * width, width=width, rows=len(micro)))
        steps.append(TypicalStep(parts=tuple(parts), tokens=sum(of_step)))
    mean = fmean(step.computed for step in steps)  # a median would leave out what padding costs now and then
    nearest = min(steps, key=lambda step: (abs(step.computed - mean), step.parts))
    longer = mean / nearest.computed
    scaled = tuple(part._replace(tokens=round(part.tokens * longer)) for part in nearest.parts)
    tokens = round(fmean(step.tokens for step in steps))
    return TypicalStep(parts=scaled, tokens=min(tokens, sum(part.tokens for part in scaled)))


def _shares(dealt: Dealt, sweeps: int) -> list[Dealt]:
    """Shares a step's micro-batches out among its sweeps, in order. Micro-batches are numerics: they are dealt before, whatever
    the number of sweeps. Where short rows make fewer of them than there are sweeps, the last sweeps have an empty one."""
    least, more = divmod(len(dealt), sweeps)
    ends = [number * least + min(number, more) for number in range(sweeps + 1)]
    return [dealt[begin:end] or [[]] for begin, end in pairwise(ends)]


# ---- laying out ------------------------------------------------------------------------------------------------------


def lay_out(rows: RowSource, indices: Sequence[int], *, pad_id: int, numerics: Numerics, sweeps: int = 1) -> Batch:
    """Returns the arrays of a step with these rows. `sweeps`: passes over the model; they share the micro-batches."""
    if numerics.padding == "step":
        return collate(rows, indices, pad_id=pad_id, max_len=numerics.max_seq_len, multiple=numerics.width_step)
    lengths = [_length(rows, index, numerics.max_seq_len) for index in indices]
    dealt = _shares(next(deal(lengths, numerics)), sweeps)
    return laid_out(rows, indices, dealt, pad_id=pad_id, numerics=numerics)


def passes(
    rows: RowSource, indices: Sequence[int], *, pad_id: int, numerics: Numerics, most: int
) -> Iterator[tuple[list[int], Batch]]:
    """Deals rows to passes of at most `most` micro-batches, long rows first. Yields their numbers in `indices`, and their
    arrays."""
    if numerics.padding == "step":
        order = sorted(range(len(indices)), key=lambda number: len(rows.tokens(indices[number])))
        at_once = most * numerics.micro_batch_size
        for first in range(0, len(order), at_once):
            chosen = order[first : first + at_once]
            yield chosen, lay_out(rows, [indices[number] for number in chosen], pad_id=pad_id, numerics=numerics)
        return
    lengths = [_length(rows, index, numerics.max_seq_len) for index in indices]
    for dealt in deal(lengths, numerics, most=most):
        chosen = [number for micro in dealt for number in micro]
        places = {number: place for place, number in enumerate(chosen)}
        of_pass = [[places[number] for number in micro] for micro in dealt]
        yield chosen, laid_out(rows, [indices[number] for number in chosen], [of_pass], pad_id=pad_id, numerics=numerics)


def laid_out(rows: RowSource, indices: Sequence[int], dealt: Sequence[Dealt], *, pad_id: int, numerics: Numerics) -> Batch:
    """Lays out rows as they were dealt to the micro-batches of each sweep. `dealt`: places in `indices`."""
    apart = numerics.padding == "none"
    widths = [_width([len(rows.tokens(indices[place])) for place in micro], numerics) for share in dealt for micro in share]
    height = sum(1 if apart else len(micro) for share in dealt for micro in share)
    input_ids = np.full((height, max(widths)), pad_id, np.int64)
    labels = np.full((height, max(widths)), NO_LOSS, np.int64)
    documents: list[list[int]] = []
    places: dict[int, Place] = {}
    sweeps: list[tuple[MicroBatch, ...]] = []
    row, width_of = 0, iter(widths)
    for share in dealt:
        parts: list[MicroBatch] = []
        for micro in share:
            first, width, begin, longest = row, next(width_of), 0, 0
            for place in micro:
                tokens, mask, own = rows.tokens(indices[place]), rows.mask(indices[place]), rows.documents(indices[place])
                end = begin + len(tokens)
                input_ids[row, begin:end] = tokens
                labels[row, begin:end] = np.where(mask != 0, tokens, NO_LOSS)
                labels[row, begin] = NO_LOSS  # nothing predicts it
                places[place] = Place(row=row, begin=begin, end=end)
                longest = max(longest, *(own or [len(tokens)]))
                if apart:
                    begin = end
                    continue
                if own is not None:
                    documents.append(_padded(own, width))
                row += 1
            if apart:
                documents.append(_padded([places[place].end - places[place].begin for place in micro], width))
                row += 1
            parts.append(MicroBatch(first=first, end=row, width=width, longest=longest or width))
        sweeps.append(tuple(parts))
    return Batch(
        input_ids=input_ids,
        labels=labels,
        tokens=sum(place.end - place.begin for place in places.values()),
        label_tokens=int(np.count_nonzero(labels != NO_LOSS)),
        documents=documents or None,
        sweeps=tuple(sweeps),
        places=tuple(places[place] for place in range(len(indices))),
    )


def _padded(documents: Sequence[int], width: int) -> list[int]:
    """Adds the padding of a row to its documents, as one more."""
    left = width - sum(documents)
    return [*documents, left] if left else [*documents]


def _length(rows: RowSource, index: int, most: int) -> int:
    length = len(rows.tokens(index))
    if length > most:
        raise ValueError(f"a row of {length} tokens does not fit max_len {most}")
    return length


def collate(rows: RowSource, indices: Sequence[int], *, pad_id: int, max_len: int, multiple: int = 8) -> Batch:
    """Pads the rows `indices` to the length of the longest, rounded up to `multiple`, but not beyond `max_len`."""
    lengths = [_length(rows, index, max_len) for index in indices]
    width = min(align_up(max(lengths), multiple), max_len)
    input_ids = np.full((len(lengths), width), pad_id, np.int64)
    labels = np.full((len(lengths), width), NO_LOSS, np.int64)
    for number, index in enumerate(indices):
        tokens = rows.tokens(index)
        input_ids[number, : len(tokens)] = tokens
        labels[number, : len(tokens)] = np.where(rows.mask(index) != 0, tokens, NO_LOSS)
    documents = [_padded(found, width) for index in indices if (found := rows.documents(index)) is not None]
    return Batch(
        input_ids=input_ids,
        labels=labels,
        tokens=sum(lengths),
        label_tokens=int(np.count_nonzero(labels[:, 1:] != NO_LOSS)),
        documents=documents or None,
        sweeps=None,
        places=tuple(Place(row=number, begin=0, end=length) for number, length in enumerate(lengths)),
    )
