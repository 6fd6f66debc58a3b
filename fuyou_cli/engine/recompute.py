"""A forward run again only for what its backward needs.

A product whose value nothing of the backward looks at (the last one of a block that adds it to its input: only the sum leaves
the block, and no gradient depends on the sum) is not computed again: zeros stand in for it. Which these are is found where a
block is inspected (`operator_trace`); here they are recognised by their number and by the weight they use.
"""

from __future__ import annotations

from typing import Any

import torch

from ..spec.model import StageSpec
from .operators import Operators, factors


class Recompute(Operators):
    """Around the second forward of `stage`, whose weights lie in `flat` (None: it has none)."""

    def __init__(self, stage: StageSpec, flat: torch.Tensor | None) -> None:
        super().__init__()
        self._weights: dict[int, int] = {}  # address by operator
        if flat is not None:
            self._weights = {o.index: flat.data_ptr() + o.weight * flat.element_size() for o in stage.unneeded}

    def operator(self, index: int, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        weight = self._weights.get(index)
        pair = factors(func, args) if weight is not None else None
        if pair is None or weight not in (pair[0].data_ptr(), pair[1].data_ptr()):
            return func(*args, **kwargs)
        return pair[0].new_zeros(pair[0].shape[0], pair[1].shape[1])
