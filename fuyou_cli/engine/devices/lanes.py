"""Sums squares by plain tensor operations in a fixed order of additions: element by element, and in halves.

The library's own reductions choose an order by the number of a card's processors. Here value i of a run goes to lane i modulo
the number of lanes, and lanes are folded in halves. The square of a float is exact in double, so only the additions round, and
every device gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...planner.device import square_lanes
from .base import Run

FEW = 1 << 11  # from this width on the lanes of all runs are folded together, because each launch takes the host microseconds

# Sums squares of values (1-D) in so many lanes, and folds them into `FEW` (float64): the same, by one launch.
Square = Callable[[torch.Tensor, torch.Tensor, int], None]


def squares_in_lanes(
    flat: torch.Tensor, runs: Sequence[Run], lanes: torch.Tensor, *, kernel: Square | None = None
) -> torch.Tensor:  # fmt: skip
    """Returns (runs,) float64 on the device of `flat`. `lanes`: float64 to compute in, at least `square_lanes` of the longest
    run. `kernel`: for long runs."""
    few = torch.zeros(len(runs), FEW, dtype=torch.float64, device=flat.device)
    for of_run, (first, count) in zip(few, runs, strict=True):
        width = square_lanes(count)
        if kernel is not None and width > FEW:
            kernel(flat[first : first + count], of_run, width)
            continue
        sums = lanes[:width].zero_() if width > FEW else of_run[:width]
        for values in flat[first : first + count].split(width):
            (sums if values.numel() == width else sums[: values.numel()]).addcmul_(values, values)
        if width > FEW:
            of_run.copy_(_folded(sums, FEW))
    return _folded(few, 1).flatten().contiguous()


def _folded(sums: torch.Tensor, width: int) -> torch.Tensor:
    """Folds the last dimension in halves, down to `width`, in place. Lanes without a value are zero."""
    left = sums.shape[-1]
    while left > width:
        left //= 2
        sums[..., :left].add_(sums[..., left : 2 * left])
    return sums[..., :left]
