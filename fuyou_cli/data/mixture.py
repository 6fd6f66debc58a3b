"""Chooses which entry of a weighted mixture gives the row at each position. Every prefix has the exact proportions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


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
