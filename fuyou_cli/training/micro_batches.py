"""How many rows are computed at once, where the recipe leaves it to the planner: part of the numerics, chosen once and kept
with the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

USUAL_TOKENS = 1024  # fills two cores, and its activations stay below the mmap threshold
MOST_TOKENS = 8192  # more keeps no machine busier
GAIN = 0.02
_NEAR = 1.25  # times the fastest usual plan: from further off no search makes a size the fastest

Seconds = Callable[[int], float | None]  # of a step with micro-batches of so many rows; None where it does not fit


def usual_size(batch_size: int, length: int) -> int:
    """Rows that the batch can be cut into, of about USUAL_TOKENS tokens."""
    return max(size for size in _divisors(batch_size) if size <= max(1, USUAL_TOKENS // length))


def larger_sizes(batch_size: int, length: int) -> list[int]:
    """Than the usual one, ascending: they fetch and add up gradients less often, and take more memory."""
    usual = usual_size(batch_size, length)
    return [size for size in _divisors(batch_size) if usual < size <= MOST_TOKENS // length]


def smaller_sizes(batch_size: int, length: int) -> list[int]:
    """Than the usual one, descending: they leave memory to other things."""
    return [size for size in reversed(_divisors(batch_size)) if size < usual_size(batch_size, length)]


def likely_sizes(batch_size: int, length: int) -> list[int]:
    """Those that a plan is most likely to come to: the usual one, and the next on either side."""
    either = smaller_sizes(batch_size, length)[:1] + larger_sizes(batch_size, length)[:1]
    return [usual_size(batch_size, length), *either]


def _divisors(batch_size: int) -> list[int]:
    return [size for size in range(1, batch_size + 1) if batch_size % size == 0]


def fastest_size(batch_size: int, length: int, *, planned: Seconds, searched: Seconds) -> int:
    """The size whose step is fastest, the usual one unless another is faster by more than GAIN. `planned` is quick: the step
    of a size's usual plan. Larger sizes are tried as long as each is faster than the one before, smaller ones too, and where
    the usual one does not fit until one does. Of the best two, where they are near each other, `searched` decides: the usual
    one is of them where it is about as fast."""
    usual = usual_size(batch_size, length)
    found: dict[int, float] = {}
    if (seconds := planned(usual)) is not None:
        found[usual] = seconds
        _follow(larger_sizes(batch_size, length), planned, found, seconds)
    _follow(smaller_sizes(batch_size, length), planned, found, seconds)
    best = sorted(found, key=lambda size: (found[size], size))[:2]
    if usual in found and usual not in best and found[usual] * (1 - GAIN) <= found[best[0]]:
        best[1] = usual
    if len(best) == 2 and found[best[1]] <= _NEAR * found[best[0]]:
        found = {size: seconds for size in best if (seconds := searched(size)) is not None} or found
    return _fastest(found, usual)


def _follow(sizes: Sequence[int], planned: Seconds, found: dict[int, float], least: float | None) -> None:
    """As long as it helps; until one fits, where none has yet (`least`: the step of the last one that does)."""
    for size in sizes:
        seconds = planned(size)
        if seconds is not None:
            found[size] = seconds
        if least is not None and (seconds is None or seconds >= least * (1 - GAIN)):
            return
        least = seconds


def _fastest(found: dict[int, float], usual: int) -> int:
    """The usual size where nothing is known: who plans it says why."""
    best = usual
    for size, seconds in sorted(found.items(), key=lambda item: (item[1], item[0])):
        if best not in found or seconds < found[best] * (1 - GAIN):
            best = size
    return best
