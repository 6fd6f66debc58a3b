"""Runs a stage's forward again for its backward, from the stage's input, and computes only what backward needs.

Backward never reads the value of some products. An example is the last product of a block that is added to the block's input:
only the sum leaves the block, and no gradient depends on the product's value. Such a product is not computed again; zeros
replace it. `operator_trace` finds these products when a block is inspected. Here they are recognised by the weight that a call
gets, as a look at every operator would cost microseconds each. Where a weight is part of a parameter, or used twice, they are
recognised by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from ...spec.model import StageSpec
from ..experts import first_matrix, is_product, outputs_of
from .called import ATTENTION, Handed, InAttention, Known, Only, handing_over, is_linear, linear_inside, numbers_of
from .operators import Operators, factors

_NOTHING_KEPT = Known(calls={}, attention=None, as_returned={})
Run = Callable[[torch.Tensor], torch.Tensor]  # a stage's forward of one micro-batch


def without_saving(run: Run, x: torch.Tensor) -> torch.Tensor:
    """Runs a forward as the recompute will: with autograd on, but without saving what autograd would save. Some kernels return
    more if a gradient is wanted, or other kernels run, which round differently and draw other dropout."""
    hooks = torch.autograd.graph.saved_tensors_hooks(_drop, _refuse)
    with torch.enable_grad(), hooks:
        return run(x.detach().requires_grad_(True)).detach()


class Recompute:
    """Implements `Activations` for a stage that keeps only its input. `as_backward`: of a block on a GPU, where attention takes
    other kernels without gradients. On a processor forward is faster without."""

    def __init__(self, stage: StageSpec, *, as_backward: bool = False) -> None:
        self._stage, self.as_backward = stage, as_backward
        self._numbers = numbers_of(stage, ())

    def forward(self, run: Run, x: torch.Tensor, micro_batch: int, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        return without_saving(run, x) if self.as_backward else run(x)

    def begin(self, micro_batch: int) -> None:
        return None

    def again(
        self, run: Run, x: torch.Tensor, micro_batch: int, flat: torch.Tensor | None, parameters: Sequence[nn.Parameter]
    ) -> torch.Tensor:
        with sparing(self._stage, flat, self._numbers, parameters):
            return run(x)

    def forget(self) -> None:
        return None


class Sparing(Operators):
    """Spares the products of `stage` whose values nobody reads, inside the context, where its weights lie in `flat` (None: it
    has none). Subclasses do more with operators."""

    def __init__(self, stage: StageSpec, flat: torch.Tensor | None) -> None:
        super().__init__()
        self._weights: dict[int, int] = {}  # operator -> address of its weight
        if flat is not None:
            self._weights = {o.index: flat.data_ptr() + o.weight * flat.element_size() for o in stage.unneeded}

    def operator(self, index: int, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        weight = self._weights.get(index)
        if weight is not None and is_product(func) and weight == first_matrix(args):
            return args[0].new_zeros(outputs_of(args))
        pair = factors(func, args) if weight is not None else None
        if pair is None or weight not in (pair[0].data_ptr(), pair[1].data_ptr()):
            return func(*args, **kwargs)
        return pair[0].new_zeros(pair[0].shape[0], pair[1].shape[1])

    def inside(
        self, known: Known | None, numbers: Mapping[int, int] | None, parameters: Sequence[nn.Parameter]
    ) -> AbstractContextManager[Any]:
        """Does so inside the context, only in the calls that compute kept outputs if they are known, and in those of products
        to spare. `numbers`: of the operators' weights among `parameters`."""
        if known is None or numbers is None:
            return self
        weights = {operator: parameters[number] for operator, number in numbers.items()}
        return handing_over(partial(self._hand_over, known, Only(self)), weights, attention=known.attention is not None)

    def _hand_over(self, known: Known, only: Only, handed: Handed) -> Any:
        if handed.operator == ATTENTION:
            assert known.attention is not None
            with InAttention(only.of(known.attention, 0)):
                return handed.run()
        if handed.func is not known.calls.get(handed.operator, handed.func):
            return handed.run()
        only.of(handed.operator, handed.address)
        if is_linear(handed) and handed.args[0].is_contiguous():  # otherwise torch may not multiply it flat
            return linear_inside(only, handed.args)
        with only:
            return handed.run()


def sparing(
    stage: StageSpec, flat: torch.Tensor | None, numbers: Mapping[int, int] | None, parameters: Sequence[nn.Parameter]
) -> AbstractContextManager[Any]:
    """Spares what a second forward need not compute, inside the context, where no output is kept."""
    return Sparing(stage, flat).inside(_NOTHING_KEPT, numbers, parameters) if stage.unneeded else nullcontext()


def _drop(tensor: torch.Tensor) -> None:
    """Drops what autograd would save in a forward that will be recomputed."""


def _refuse(nothing: None) -> NoReturn:
    raise AssertionError("a forward that is recomputed has no backward of its own")
