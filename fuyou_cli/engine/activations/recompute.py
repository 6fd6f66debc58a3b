"""Runs a stage's forward again for its backward, from the stage's input, and computes only what backward needs.

Backward never reads the value of some products. An example is the last product of a block that is added to the block's input:
only the sum leaves the block, and no gradient depends on the product's value. Such a product is not computed again; zeros
replace it. `operator_trace` finds these products when a block is inspected. Here they are recognised by the weight they use,
and by their number where operators are numbered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...spec.model import StageSpec
from .operators import Operators, factors

Run = Callable[[torch.Tensor], torch.Tensor]  # a stage's forward of one micro-batch


def without_saving(run: Run, x: torch.Tensor) -> torch.Tensor:
    """Runs a forward as the recompute will: with autograd on, but without saving what autograd would save. Some kernels return
    more if a gradient is wanted, or other kernels run, which round differently and draw other dropout."""
    hooks = torch.autograd.graph.saved_tensors_hooks(_drop, _refuse)
    with torch.enable_grad(), hooks:
        return run(x.detach().requires_grad_(True)).detach()


class Recompute:
    """Implements `Activations` for a stage that keeps only its input. `as_backward`: of a block on a GPU, where attention takes
    other kernels without gradients. The emulated device does the same. On a processor forward is faster without."""

    def __init__(self, stage: StageSpec, *, as_backward: bool = False) -> None:
        self._stage, self.as_backward = stage, as_backward

    def forward(self, run: Run, x: torch.Tensor, micro_batch: int, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        return without_saving(run, x) if self.as_backward else run(x)

    def begin(self, micro_batch: int) -> None:
        return None

    def again(
        self, run: Run, x: torch.Tensor, micro_batch: int, flat: torch.Tensor | None, parameters: Sequence[nn.Parameter]
    ) -> torch.Tensor:
        with SparingCalls(self._stage, flat) if self._stage.unneeded else nullcontext():
            return run(x)

    def forget(self) -> None:
        return None


class SparingCalls(TorchFunctionMode):
    """Wraps the second forward of `stage`, whose weights lie in `flat` (None: it has none). A look at an operator's arguments
    below autograd costs microseconds, so only calls that get the weight of a product to spare are looked into. A weight that
    another product needs is not looked for."""

    def __init__(self, stage: StageSpec, flat: torch.Tensor | None) -> None:
        super().__init__()
        needed = {operator.weight for operator in stage.operators}
        spared = [operator.weight for operator in stage.unneeded if operator.weight not in needed]
        self._weights = {flat.data_ptr() + place * flat.element_size() for place in spared} if flat is not None else set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for given in args:
            if isinstance(given, torch.Tensor) and given.data_ptr() in self._weights:
                with _Zeros(self._weights):
                    return func(*args, **kwargs)
        return func(*args, **kwargs)


class _Zeros(TorchDispatchMode):
    """Makes zeros of products with these weights (addresses)."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = weights

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pair = factors(func, args)
        if pair is None or self._weights.isdisjoint((pair[0].data_ptr(), pair[1].data_ptr())):
            return func(*args, **(kwargs or {}))
        return pair[0].new_zeros(pair[0].shape[0], pair[1].shape[1])


class Sparing(Operators):
    """Does the same where operators are numbered anyway, for what subclasses do with them."""

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


def _drop(tensor: torch.Tensor) -> None:
    """Drops what autograd would save in a forward that will be recomputed."""


def _refuse(nothing: None) -> NoReturn:
    raise AssertionError("a forward that is recomputed has no backward of its own")
