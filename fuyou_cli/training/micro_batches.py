"""How many rows are computed at once, where the recipe leaves it to the planner: part of the numerics, chosen once and kept
with the run."""

from __future__ import annotations

from collections.abc import Callable

USUAL_TOKENS = 1024  # fills two cores, and its activations stay below the mmap threshold
MOST_TOKENS = 8192  # more keeps no machine busier
GAIN = 0.02
_LARGER, _SMALLER = 2, 1  # sizes tried on either side of the usual one


def usual_size(batch_size: int, length: int) -> int:
    """Rows that the batch can be cut into, of about USUAL_TOKENS tokens."""
    return max(size for size in _divisors(batch_size) if size <= max(1, USUAL_TOKENS // length))


def sizes(batch_size: int, length: int) -> list[int]:
    """What a plan is made for, the usual size first: larger ones fetch and add up gradients less often, smaller ones leave
    memory to other things."""
    usual = usual_size(batch_size, length)
    larger = [size for size in _divisors(batch_size) if usual < size <= max(1, MOST_TOKENS // length)]
    smaller = [size for size in _divisors(batch_size) if size < usual]
    return [usual, *larger[:_LARGER], *smaller[::-1][:_SMALLER]]


def _divisors(batch_size: int) -> list[int]:
    return [size for size in range(1, batch_size + 1) if batch_size % size == 0]


def fastest_size(batch_size: int, length: int, step_seconds: Callable[[int], float | None]) -> int:
    """The size whose step is fastest, the usual one unless another is faster by more than GAIN. `step_seconds` plans one; None
    where it does not fit."""
    found = {size: step_seconds(size) for size in sizes(batch_size, length)}
    usual = usual_size(batch_size, length)
    best, least = usual, found[usual]
    for size, seconds in found.items():
        if seconds is not None and (least is None or seconds < least * (1 - GAIN)):
            best, least = size, seconds
    return best
