"""Sums of squares by plain tensor operations whose order of additions is written out: element by element and in halves.

The library's own reductions choose an order by the number of a card's processors. Here value i of a run goes to lane i mod
the number of lanes, and lanes are folded in halves. A square of a float is exact in double, so the additions are all that
rounds, and every device gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...planner.device import square_lanes
from .base import Run


def squares_in_lanes(flat: torch.Tensor, runs: Sequence[Run], lanes: torch.Tensor) -> torch.Tensor:
    """(runs,) float64 on the device of `flat`. `lanes`: float64 to compute in, `square_lanes` of the longest run or more."""
    found = torch.empty(len(runs), dtype=torch.float64, device=flat.device)
    for number, (first, count) in enumerate(runs):
        width = square_lanes(count)
        sums = lanes[:width].zero_()
        for values in flat[first : first + count].split(width):
            sums[: values.numel()].addcmul_(values, values)
        while width > 1:
            width //= 2
            sums[:width].add_(sums[width : 2 * width])
        found[number].copy_(sums[0])
    return found
