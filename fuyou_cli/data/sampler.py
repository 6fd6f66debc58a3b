"""Chooses the rows of step n, and which samples are held back. The step number is the position in the data: a resumed run
replays nothing."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray


def permutation(rows: int, *, seed: int, epoch: int, entry: int, part: int = 0) -> NDArray[np.int64]:
    """Returns the order of the rows of an entry, or of a part of it, in an epoch.

    It is the stable sort order of Philox's raw output. numpy keeps that output the same between releases, but not
    `Generator.permutation`.
    """
    key, counter = np.array([seed % (1 << 64), epoch], np.uint64), np.array([0, 0, part, entry], np.uint64)
    return np.argsort(np.random.Philox(key=key, counter=counter).random_raw(rows), kind="stable")


class _Order:
    """The endless order of one entry's rows, from `first` on: every epoch is a permutation of all of them.

    One permutation is held: 8 bytes per row.
    """

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
    has its own endless sequence, and `Mixture` says which entry is next. An epoch of a mixture is as many rows as there are.
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
        if rows < 1 or batch_size < 1:
            raise ValueError(f"a sampler needs rows and a batch size of at least 1, not {rows} and {batch_size}")
        sizes = list(entry_rows) if weights else [rows]
        if sum(sizes) != rows or min(sizes) < 1 or (weights and len(weights) != len(sizes)):
            raise ValueError(f"entries of {sizes} rows and the weights {list(weights)} do not make a mixture of {rows} rows")
        self.rows = rows
        self.batch_size = batch_size
        firsts = accumulate(sizes, initial=0)
        self._sizes = sizes
        self._orders = [
            _Order(size, first=first, entry=entry, shuffle=shuffle, seed=seed)
            for entry, (size, first) in enumerate(zip(sizes, firsts, strict=False))
        ]
        self._mixture = Mixture(weights) if len(weights) > 1 else None

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
        told = f"{self.rows:,} row{'s' * (self.rows != 1)}, batches of {self.batch_size:,}: {', and '.join(facts)}"
        return f"{told} (use a smaller train.batch_size to come closer)"

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
        if step < 0:
            raise ValueError(f"step {step} is negative")
        position = step * self.batch_size
        if self._mixture is None:
            return self._orders[0].take(position, self.batch_size)
        given, entries = self._mixture.picks(position, self.batch_size)
        parts = [iter(order.take(given[n], entries.count(n))) for n, order in enumerate(self._orders)]
        return [next(parts[entry]) for entry in entries]


# ---- mixtures --------------------------------------------------------------------------------------------------------


class Mixture:
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
class Part:
    """Names the samples held back, or the others. A worker is asked for one part in its own process."""

    fraction: float
    seed: int
    held: bool

    def takes(self, entry: int, number: int) -> bool:
        """Whether a sample of an entry of the recipe is in this part. Both count from 0."""
        return is_held(self.fraction, seed=self.seed, entry=entry, number=number) == self.held

    def as_request(self) -> dict[str, object]:
        """The part of a worker's request."""
        return {"part": asdict(self)}


def is_held(fraction: float, *, seed: int, entry: int, number: int) -> bool:
    """Whether a sample is held back: one of every 1/`fraction`, drawn among these. So of any first samples as many are
    held as the fraction says, to within one, and none depends on those after it."""
    share = Fraction(str(fraction))
    run = math.ceil((number + 1) * share) - 1
    first, end = math.floor(run / share), math.floor((run + 1) / share)
    drawn = hashlib.sha256(f"{seed} {entry} {run}".encode()).digest()
    return number == first + int.from_bytes(drawn[:8], "little") % (end - first)
