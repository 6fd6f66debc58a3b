"""Which tensors of a small model go to RAM, every set of them looked at instead of a fixed order.

An order leaves as much RAM empty as one more tensor would take. Of a hundred stages that is a hundredth; of five it may be a
third, and which tensors fit beside which decides how long a step is. What a set takes and what it saves are sums over its
members, so that thousands of sets are told apart before any of them is placed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

MOST_TENSORS = 16  # of a small model
_MOST_IN_SETS = 13  # of one whose sets are all looked at: 8,192 of them
_MOST_SETS = 256  # of them, those that save most


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One that may rest in RAM: its kind is a field of `Homes`. `saved`: bytes of traffic per step."""

    kind: str
    stage: int
    size: int
    saved: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """Slots in RAM that some tensors pass through as long as they rest on the ssd: as many as there are such tensors, and
    `more`, but not more than `count`."""

    members: int  # a set
    count: int
    more: int
    size: int  # bytes of one

    def taken(self, left: int) -> int:
        """Bytes of slots with so many of the members on the ssd."""
        return self.size * min(self.count, left + self.more) if left else 0

    def beside(self, sizes: Sequence[int]) -> list[int]:
        """What sets of tensors take in RAM with the slots of the others."""
        taken = [self.taken(left) for left in range(self.members.bit_count() + 1)]
        return [size + taken[(self.members & ~number).bit_count()] for number, size in enumerate(sizes)]


def nearest(number: int, tensors: Sequence[Tensor]) -> Iterator[int]:
    """Sets that differ in one tensor, then those that differ in two."""
    bits = [1 << place for place in range(len(tensors))]
    yield from (number ^ bit for bit in bits)
    yield from (number ^ one ^ other for one, other in combinations(bits, 2))


def best_first(tensors: Sequence[Tensor], slots: Sequence[Slots], *, room: int) -> Iterator[int]:
    """Of the sets that take at most `room` bytes of RAM with the slots of the others those that save most traffic; and of these
    first those that no other tensor could join. A set is a number whose bits stand for `tensors`. None of many."""
    if len(tensors) > _MOST_IN_SETS:
        return
    sizes, saved = [0], [0.0]
    for tensor in tensors:
        sizes += [size + tensor.size for size in sizes]
        saved += [known + tensor.saved for known in saved]
    for some in slots:
        sizes = some.beside(sizes)
    fitting = [number for number, size in enumerate(sizes) if size <= room]
    fitting.sort(key=lambda number: (-saved[number], sizes[number]))
    bits = [1 << place for place in range(len(tensors))]

    def could_grow(number: int) -> bool:
        return any(sizes[number | bit] <= room for bit in bits if not number & bit)

    yield from sorted(fitting[:_MOST_SETS], key=could_grow)
