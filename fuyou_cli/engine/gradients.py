"""Summing a stage's gradients over micro-batches, where the plan says they are summed.

Each parameter's gradient is added the moment autograd has it and dropped at once, so that only one tensor's gradient
exists beside the sum. The order of additions is the order of micro-batches: it is part of the numerics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from ..core.errors import NumericsError
from ..spec.model import Dtype, StageSpec, TensorSpec
from ..swap.kernels import sum_squares

PIECE = 1 << 19  # elements added at once
LOOK = "lower optimizer.lr or look at the data of this step"  # where a step's numbers are not finite


@dataclass(slots=True)
class GradientSum:
    """The gradients of one stage in one flat tensor (host or device memory), laid out like its weights."""

    stage: StageSpec
    flat: torch.Tensor
    touched: set[int] = field(default_factory=set)

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Adds a whole tensor's gradient (any float dtype) to parameter `index`."""
        spec = self.stage.tensors[index]
        target = self.flat[spec.offset : spec.offset + spec.numel].view(spec.shape)
        if index in self.touched:
            add_in_pieces(target, gradient)
        else:
            target.copy_(gradient)
            self.touched.add(index)

    def add_rows(self, index: int, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Adds `values` (len(rows), ...) to the distinct rows of parameter `index`."""
        spec = self.stage.tensors[index]
        target = self.flat[spec.offset : spec.offset + spec.numel].view(spec.shape)
        if index not in self.touched:
            target.zero_()
            self.touched.add(index)
        target.index_add_(0, rows, values.to(target.dtype))

    @contextmanager
    def collecting(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Inside, gradients of the stage's installed parameters go to the sum instead of `.grad`."""

        def collect(index: int) -> object:
            def hook(parameter: torch.Tensor) -> None:
                assert parameter.grad is not None
                self.add(index, parameter.grad)
                parameter.grad = None

            return parameters[index].register_post_accumulate_grad_hook(hook)

        hooks = [collect(index) for index in range(len(parameters))]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()  # type: ignore[attr-defined]

    def complete(self) -> None:
        """Parameters no gradient came for, and the padding between tensors, get zeros: the update reads them all."""
        end = 0
        for index, spec in enumerate(self.stage.tensors):
            self.flat[end : spec.offset].zero_()
            end = spec.offset + spec.numel
            if index not in self.touched:
                self.flat[spec.offset : end].zero_()
        self.flat[end:].zero_()


def add_in_pieces(target: torch.Tensor, gradient: torch.Tensor) -> None:
    """In place. On the CPU torch first makes a whole copy of a gradient of another dtype, in the sum's: as large as the sum,
    and page after page of it new. Piece by piece the copy stays in the cache."""
    if gradient.dtype == target.dtype or target.device.type != "cpu" or not gradient.dim():
        target.add_(gradient)
        return
    rows = max(1, PIECE * len(gradient) // max(1, gradient.numel()))
    for part, more in zip(target.split(rows), gradient.split(rows), strict=True):
        part.add_(more)


def squared_norm(
    stage: StageSpec, squares: Sequence[float], host: torch.Tensor, *, dtype: Dtype, step: int, changed: bool, reached: set[str]
) -> float:
    """Sum of squares of a stage's gradients, tensor by tensor in order. `squares`: of every tensor, as the device has summed
    them. Raises NumericsError naming the tensor when a value is not finite, and counts these in `host`, the same gradients in
    host memory; `changed`: whether an update of the step has begun. Names of tensors with a gradient that is not zero are
    added to `reached`."""
    total = 0.0
    for spec, value in zip(stage.tensors, squares, strict=True):
        if not math.isfinite(value):
            raise NumericsError(
                f"step {step}: {_nonfinite(spec, host, dtype)} gradients of {spec.name} ({stage.name}) are not finite",
                hint=LOOK,
                changed=changed,
            )
        if value:
            reached.add(spec.name)
        total += value
    return total


def _nonfinite(spec: TensorSpec, host: torch.Tensor, dtype: Dtype) -> int:
    return sum_squares(host[spec.offset : spec.offset + spec.numel].view(torch.uint8).numpy().data, dtype)[1]
