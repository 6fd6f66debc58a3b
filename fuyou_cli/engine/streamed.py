"""A streamed stage: one autograd.Function that hands forward and backward of a stage to the passes.

The model's own forward stays the choreography. Its stages get their `forward` replaced on the instance (undone on
close); what flows between them are whole-batch tensors in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .anatomy import Anatomy
from .calls import StageCall, boundary_of, own_forward, with_boundary


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a stage's own forward, to be repeated per micro-batch: `run(x)` with the other arguments bound."""

    stage: int
    run: Callable[[torch.Tensor], torch.Tensor]


class Passes(Protocol):
    """What computes a streamed stage. Tensors are whole-batch, in host memory."""

    def forward(self, call: Call, x: torch.Tensor) -> torch.Tensor: ...

    def backward(self, call: Call, ids: torch.Tensor | None, grad_y: torch.Tensor) -> torch.Tensor | None: ...

    def shared(self, value: torch.Tensor) -> torch.Tensor:
        """Returns `value`, the same for all rows, on the device: one copy for all stages of a step."""
        ...


class StreamedStage(torch.autograd.Function):
    """Takes an `anchor` that requires grad, so that a stage whose input is integer ids has a backward at all."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor, call: Call, passes: Passes) -> torch.Tensor:
        ctx.call, ctx.passes = call, passes
        ctx.ids = None if x.is_floating_point() else x
        ctx.gradient = None  # given to this node beside autograd, in the place of an empty one
        return passes.forward(call, x)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[None, torch.Tensor | None, None, None]:
        if ctx.gradient is not None:
            grad_y, ctx.gradient = ctx.gradient, None
        return None, ctx.passes.backward(ctx.call, ctx.ids, grad_y), None, None


def streamed_forward(
    stage: int, name: str, original: Callable[..., Any], passes: Passes, anchor: torch.Tensor, device: torch.device
) -> Callable[..., Any]:
    """Makes the replacement for one stage's `forward`. Every tensor beside the stage's input must be the same for all rows."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        call, x = StageCall.split(name, original, args, kwargs)
        if device.type != "cpu":
            call = call.placed(passes.shared)
        structure: list[Any] = []

        def run(part: torch.Tensor) -> torch.Tensor:
            out = call.output(part)
            boundary = boundary_of(out, name)
            structure[:] = [with_boundary(out, None, name)]  # without tensors: they would live until the stage is done
            return boundary

        y = StreamedStage.apply(anchor, x, Call(stage, run), passes)  # type: ignore[no-untyped-call]
        return with_boundary(structure[0], y, name)

    return forward


class StreamedModel:
    """A model whose stages are handed to `passes`, until it is closed. `inside` is called in the middle of a stage's forward,
    to begin what prefetches were fetched for: a visit of one micro-batch is long."""

    def __init__(self, anatomy: Anatomy, passes: Passes, device: torch.device, inside: Callable[[], None]) -> None:
        self._replaced: list[nn.Module] = []
        self._hooks: list[RemovableHandle] = []
        anchor = torch.zeros((), requires_grad=True)
        for index, stage in enumerate(anatomy.stages):
            if stage.module is None or stage.module in self._replaced:
                continue
            original = own_forward(stage.module)
            stage.module.forward = streamed_forward(index, stage.name, original, passes, anchor, device)
            self._replaced.append(stage.module)
            self._hooks += stage.call_inside(inside)
            for module in stage.module.modules():
                for name, value in module._buffers.items():
                    module._buffers[name] = None if value is None else value.to(device)

    def close(self) -> None:
        for module in self._replaced:
            module.__dict__.pop("forward", None)
        self._replaced.clear()
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
