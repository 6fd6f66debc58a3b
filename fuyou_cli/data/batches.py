"""Chooses the rows of a step and the samples held back, deals rows to micro-batches by length, and lays them out as arrays.

The step number is the position in the data: a resumed run replays nothing. Rows of unlike length are the usual case. A model
whose attention can keep documents apart gets them end to end (`padding` of the numerics is none): nothing lies between them.
Any other gets them by length, each micro-batch as wide as its longest row. Widths come from a small set (`width_step`),
because libraries compile and keep code for each.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
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
class RowPlace:
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
    sweeps: tuple[tuple[MicroBatch, ...], ...] | None  # of each sweep or lane; None: all are as wide as the array
    places: tuple[RowPlace, ...]  # of the rows, in the order in which they were asked for

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
    """Gives lists of tokens as rows, without labels."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._sequences = sequences

    def tokens(self, index: int) -> NDArray[np.int32]:
        return np.asarray(self._sequences[index], np.int32)

    def mask(self, index: int) -> NDArray[np.uint8]:
        return np.zeros(len(self._sequences[index]), np.uint8)

    def documents(self, index: int) -> None:
        return None


# ---- dealing ---------------------------------------------------------------------------------------------------------


class _Rooms:
    """Keeps what room each of up to `most` places has left, as a tree of maxima: a search through all of them made a plan for
    16,384 rows take a minute."""

    def __init__(self, most: int) -> None:
        self._leaves = 1 << max(0, most - 1).bit_length()
        self._largest = [-1] * (2 * self._leaves)  # below each node; -1: no place yet

    def of(self, place: int) -> int:
        return self._largest[self._leaves + place]

    def put(self, place: int, room: int) -> None:
        node, largest = self._leaves + place, self._largest
        largest[node] = room
        while node > 1:
            node //= 2
            if largest[node] == (most := max(largest[2 * node], largest[2 * node + 1])):
                break
            largest[node] = most

    def first(self, size: int) -> int | None:
        """Returns the first place with this much room."""
        node, largest = 1, self._largest
        if largest[node] < size:
            return None
        while node < self._leaves:
            node = 2 * node if largest[2 * node] >= size else 2 * node + 1
        return node - self._leaves


def deal(lengths: Sequence[int], numerics: Numerics, *, most: int | None = None) -> Iterator[Dealt]:
    """Deals rows of these lengths to micro-batches, the longest first. Yields one pass, or as many as it takes to have at most
    `most` micro-batches in each.

    A micro-batch has room for `micro_batch_size` rows of `max_seq_len` tokens; rows laid end to end share it (first fit).
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    apart = numerics.padding == "none"
    room = numerics.micro_batch_tokens if apart else numerics.micro_batch_size
    dealt: Dealt = []
    places = len(lengths) if most is None else min(most, len(lengths))
    left = _Rooms(places)  # of micro-batches that take more: tokens where rows lie end to end, else rows
    for number in order:
        size = lengths[number] if apart else 1
        place = left.first(size)
        if place is None:
            if most is not None and len(dealt) == most:
                yield dealt
                dealt, left = [], _Rooms(places)
            if not apart and dealt:
                left.put(len(dealt) - 1, 0)  # rows of a length stay together where each has its own: only the newest has room
            place = len(dealt)
            dealt.append([])
            left.put(place, room)
        dealt[place].append(number)
        left.put(place, left.of(place) - size)
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


def in_lanes(dealt: Dealt, lanes: int) -> list[Dealt]:
    """Deals a step's micro-batches to lanes in turn: the longest come first, and replicas compute some lanes each. Where short
    rows make fewer of them than there are lanes, the last lanes have an empty one."""
    return [dealt[lane::lanes] or [[]] for lane in range(lanes)]


# ---- laying out ------------------------------------------------------------------------------------------------------


def lay_out(rows: RowSource, indices: Sequence[int], *, pad_id: int, numerics: Numerics, sweeps: int = 1) -> Batch:
    """Returns the arrays of a step with these rows. `sweeps`: passes over the model; they share the micro-batches."""
    if numerics.padding == "step":
        return collate(rows, indices, pad_id=pad_id, max_len=numerics.max_seq_len, multiple=numerics.width_step)
    lengths = [_length(rows, index, numerics.max_seq_len) for index in indices]
    micro_batches = next(deal(lengths, numerics))
    dealt = _shares(micro_batches, sweeps) if numerics.lanes == 1 else in_lanes(micro_batches, numerics.lanes)
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
    places: dict[int, RowPlace] = {}
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
                places[place] = RowPlace(row=row, begin=begin, end=end)
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
    documents = [_padded(documents_of, width) for index in indices if (documents_of := rows.documents(index)) is not None]
    return Batch(
        input_ids=input_ids,
        labels=labels,
        tokens=sum(lengths),
        label_tokens=int(np.count_nonzero(labels[:, 1:] != NO_LOSS)),
        documents=documents or None,
        sweeps=None,
        places=tuple(RowPlace(row=number, begin=0, end=length) for number, length in enumerate(lengths)),
    )


# ---- the rows of a step ----------------------------------------------------------------------------------------------


def permutation(rows: int, *, seed: int, epoch: int, entry: int, part: int = 0) -> NDArray[np.int64]:
    """Returns the order of the rows of an entry, or of a part of it, in an epoch.

    It is the stable sort order of Philox's raw output. numpy keeps that output the same between releases, but not
    `Generator.permutation`.
    """
    key, counter = np.array([seed % (1 << 64), epoch], np.uint64), np.array([0, 0, part, entry], np.uint64)
    return np.argsort(np.random.Philox(key=key, counter=counter).random_raw(rows), kind="stable")


class _Order:
    """The endless order of one entry's rows, from `first` on: every epoch is a permutation of all of them. One is held: 8 bytes
    per row."""

    def __init__(self, rows: int, *, first: int, entry: int, shuffle: bool, seed: int) -> None:
        self._rows, self._first, self._entry = rows, first, entry
        self._shuffle, self._seed = shuffle, seed
        self._epoch: int | None = None
        self._order: NDArray[np.int64] = np.arange(0)

    def take(self, position: int, count: int) -> list[int]:
        """Returns the rows at `count` positions of the order."""
        chosen: list[int] = []
        while len(chosen) < count:
            epoch, begin = divmod(position + len(chosen), self._rows)
            chosen += (self._permutation(epoch)[begin : begin + count - len(chosen)] + self._first).tolist()
        return chosen

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if self._epoch is None or (self._shuffle and self._epoch != epoch):
            self._order, self._epoch = np.arange(0), None  # freed before the next one is made
            if self._shuffle:
                self._order = permutation(self._rows, seed=self._seed, epoch=epoch, entry=self._entry)
            else:
                self._order = np.arange(self._rows)
            self._epoch = epoch
        return self._order


class Sampler:
    """Draws the rows of every global step.

    Epochs follow each other without a gap: step n takes positions [n * batch_size, (n + 1) * batch_size) of one endless
    sequence. Without weights the permutation of epoch e fills positions [e * rows, (e + 1) * rows). In a mixture every entry
    has its own endless sequence, and `DatasetMixture` says which entry is next. An epoch of a mixture is as many rows as there
    are.
    """

    PEAK_BYTES = 24  # per row of the order: 8 drawn, 8 of their order, and the sort's working memory

    def __init__(
        self,
        rows: int,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        entry_rows: Sequence[int] = (),
        weights: Sequence[float] = (),
    ) -> None:
        """Takes, for a mixture, each entry's number of rows (they are stored one entry after the other) and weight."""
        self.rows, self.batch_size = rows, batch_size
        self._sizes = list(entry_rows) if weights else [rows]
        firsts = accumulate(self._sizes, initial=0)
        self._orders = [
            _Order(size, first=first, entry=entry, shuffle=shuffle, seed=seed)
            for entry, (size, first) in enumerate(zip(self._sizes, firsts, strict=False))
        ]
        self._mixture = DatasetMixture(weights) if len(weights) > 1 else None

    @property
    def peak_bytes(self) -> int:
        """Returns the most bytes that it ever takes."""
        return self.PEAK_BYTES * self.rows

    def steps(self, epochs: float) -> int:
        """Returns the steps until every row has been seen `epochs` times (a fraction counts rows, rounded up)."""
        positions = -int(-(self.rows * epochs) // 1)
        return -(-positions // self.batch_size)

    def note(self, steps: int, epochs: int | None) -> str | None:
        """Returns what may surprise a person about a run of `steps`: rows that repeat within a step, or a tenth more epochs
        than the recipe's (None: it asks for steps)."""
        seen = steps * self.batch_size
        more = epochs is not None and 10 * seen > 11 * self.rows * epochs
        facts = []
        if self.batch_size > self.rows:
            facts.append(f"each row is seen about {self.batch_size / self.rows:.3g} times per step")
        if more:
            are = "steps are" if steps != 1 else "step is"
            facts.append(f"{steps:,} {are} {self.epoch(steps):.3g} epochs, but train.epochs is {epochs}")
        if not facts:
            return None
        note = f"{self.rows:,} row{'s' * (self.rows != 1)}, batches of {self.batch_size:,}: {', and '.join(facts)}"
        return f"{note} (use a smaller train.batch_size to come closer)"

    def epoch(self, step: int) -> float:
        """Returns how many times the data has been seen before global step `step`."""
        return step * self.batch_size / self.rows

    def entry_epochs(self, steps: int) -> list[float]:
        """Returns how many times each entry of a mixture is seen in this many steps."""
        given = [steps * self.batch_size] if self._mixture is None else self._mixture.before(steps * self.batch_size)
        return [rows / size for rows, size in zip(given, self._sizes, strict=True)]

    def is_ready(self, step: int, is_given_up: Callable[[], bool]) -> bool:
        """Tells that the rows of global step `step` are there, as `stream.Stream` does."""
        return True

    def batch(self, step: int) -> list[int]:
        """Returns the row indices of global step `step`; 0 is the first."""
        position = step * self.batch_size
        if self._mixture is None:
            return self._orders[0].take(position, self.batch_size)
        given, entries = self._mixture.picks(position, self.batch_size)
        parts = [iter(order.take(given[n], entries.count(n))) for n, order in enumerate(self._orders)]
        return [next(parts[entry]) for entry in entries]


# ---- mixtures --------------------------------------------------------------------------------------------------------


class DatasetMixture:
    """Deals positions 0, 1, 2, ... to entries. After any n of them each entry has had its share of n, to within one.

    The rule is Tijdeman's for the chairman assignment problem (Discrete Mathematics 32, 1980): of the entries that are owed
    enough, it takes the one whose share would be overdue first. Weights are taken as written decimals, so all arithmetic is on
    whole numbers. The order repeats after the shares' common denominator, and a position is reached from the last repetition
    before it. There are at least two weights.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        shares = [weight / sum(exact) for weight in exact]
        self._period = math.lcm(*(share.denominator for share in shares))
        self._parts = [int(share * self._period) for share in shares]  # of a period
        common = math.lcm(*self._parts)
        self._urgency = [common // part for part in self._parts]
        self._begin(0)

    def picks(self, position: int, count: int) -> tuple[list[int], list[int]]:
        """Returns how many rows each entry gave before `position`, and the entries of the next `count` positions."""
        if position < self._position or position - self._position >= self._period:
            self._begin(position // self._period)
        while self._position < position:
            self._next()
        return list(self._given), [self._next() for _ in range(count)]

    def before(self, position: int) -> list[int]:
        """Returns each entry's share of this many positions, in rows, to within one."""
        return [position * part // self._period for part in self._parts]

    def _begin(self, periods: int) -> None:
        self._position = periods * self._period
        self._given = [periods * part for part in self._parts]
        self._owed = [0] * len(self._parts)  # in parts of a row: a period of them is one row

    def _next(self) -> int:
        for entry, part in enumerate(self._parts):
            self._owed[entry] += part
        slices = 2 * len(self._parts) - 2  # slices of a row: an entry owed one slice may be chosen
        ready = [entry for entry, owed in enumerate(self._owed) if owed * slices >= self._period]
        chosen = min(ready, key=self._time_left)
        self._owed[chosen] -= self._period
        self._given[chosen] += 1
        self._position += 1
        return chosen

    def _time_left(self, entry: int) -> int:
        """Returns how long the entry can still wait, in a unit common to all entries."""
        slices = 2 * len(self._parts) - 2
        return (self._period * (slices - 1) - self._owed[entry] * slices) * self._urgency[entry]


# ---- samples held back (dataset.eval_fraction) -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldPart:
    """Names the samples held back, or the others. A worker is asked for one part in its own process."""

    fraction: float
    seed: int
    held: bool

    def takes(self, entry: int, number: int) -> bool:
        """Whether a sample of an entry of the recipe is in this part. Both count from 0.

        One is held back of every 1/`fraction`, drawn among these. So of any first samples as many are held as the fraction
        says, to within one, and none depends on those after it."""
        share = Fraction(str(self.fraction))
        run = math.ceil((number + 1) * share) - 1
        first, end = math.floor(run / share), math.floor((run + 1) / share)
        drawn = hashlib.sha256(f"{self.seed} {entry} {run}".encode()).digest()
        is_held = number == first + int.from_bytes(drawn[:8], "little") % (end - first)
        return is_held == self.held
