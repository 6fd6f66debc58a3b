"""Runs a stage's forward again for its backward, from the stage's input, and computes only what backward needs.

Backward never reads the value of some products. An example is the last product of a block that is added to the block's input:
only the sum leaves the block, and no gradient depends on the product's value. Such a product is not computed again; zeros
replace it. `operator_trace` finds these products when a block is inspected. Here they are recognised by their number and the
weight they use.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ...spec.model import StageSpec
from .operators import Operators, factors

Run = Callable[[torch.Tensor], torch.Tensor]  # a stage's forward of one micro-batch


class Recompute:
    """Implements `Activations` for a stage that keeps only its input."""

    as_backward = False

    def __init__(self, stage: StageSpec) -> None:
        self._stage = stage

    def forward(self, run: Run, x: torch.Tensor, micro_batch: int) -> torch.Tensor:
        return run(x)

    def begin(self, micro_batch: int) -> None:
        return None

    def again(self, run: Run, x: torch.Tensor, micro_batch: int, flat: torch.Tensor | None) -> torch.Tensor:
        with Sparing(self._stage, flat) if self._stage.unneeded else nullcontext():
            return run(x)

    def forget(self) -> None:
        return None


class Sparing(Operators):
    """Wraps the second forward of `stage`, whose weights lie in `flat` (None: it has none)."""

    def __init__(self, stage: StageSpec, flat: torch.Tensor | None) -> None:
        super().__init__()
        self._weights: dict[int, int] = {}  # operator -> address of its weight
        if flat is not None:
            self._weights = {o.index: flat.data_ptr() + o.weight * flat.element_size() for o in stage.unneeded}

    def operator(self, index: int, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        weight = self._weights.get(index)
        pair = factors(func, args) if weight is not None else None
        if pair is None or weight not in (pair[0].data_ptr(), pair[1].data_ptr()):
            return func(*args, **kwargs)
        return pair[0].new_zeros(pair[0].shape[0], pair[1].shape[1])
