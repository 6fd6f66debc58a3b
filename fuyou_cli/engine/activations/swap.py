"""Keeps outputs of operators from forward to backward. Forward copies them next to the boundary; the recompute gets them
back and computes only what was not kept.

Each output is given back once, so the model's code may change it in place. Forward runs as the recompute will: with autograd
on, but dropping what autograd would save. Some kernels return more, or other kernels run, when a gradient is wanted.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from ...core.errors import UsageError
from ...core.units import align_up
from ...planner.boundary_layout import OUTPUT_ALIGN
from ...planner.device import BOUNDARIES_ACROSS
from ...spec.model import OperatorSpec, StageSpec
from ...spec.plan import Span
from ..boundaries import Boundaries
from ..devices.base import Device, Event
from ..host_memory import HostMemory
from ..moves import Waiting
from .operators import Operators
from .recompute import Run, Sparing


@dataclass(frozen=True, slots=True)
class _Resting:
    """One tensor of an output. It begins `offset` bytes after the output's start."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self, memory: HostMemory, span: Span) -> torch.Tensor:
        """Returns a view in the arena, with the strides that it had."""
        size = self.shape.numel() * self.dtype.itemsize
        flat = memory.tensor(Span(offset=span.offset + self.offset, size=size), self.dtype)
        return flat.as_strided(self.shape, self.stride)


Output = tuple[list[Any], bool]  # tensors that rest and values as they are; whether the operator returns a tuple
Leaving = list[list[Event]]  # copies to the host by micro-batch, of all stages in order
Outputs = dict[int, Output]  # by operator
Arrived = dict[int, tuple[list[Any], list[Event]]]  # by operator: values where they are computed with, and copies to wait for


class Swap:
    """Implements `Activations` of a stage that keeps outputs. Layouts of what rests are remembered from forward to backward."""

    as_backward = True

    def __init__(
        self,
        stage: StageSpec,
        kept: tuple[int, ...],
        *,
        boundaries: Boundaries,
        memory: HostMemory,
        device: Device,
        waiting: Waiting,
        leaving: Leaving,
    ) -> None:
        self._stage, self._boundaries, self._waiting = stage, boundaries, waiting
        self.memory, self.device = memory, device
        self.chosen = {operator.index: operator for operator in stage.operators if operator.index in kept}
        self._resting: dict[int, Outputs] = {}  # by micro-batch
        self._leaving = leaving
        self._arriving: dict[int, Arrived] = {}

    def forward(self, run: Run, x: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """Runs the forward; the copies of the micro-batch before are over at its end."""
        mode = _Keeping(self, micro_batch)
        hooks = torch.autograd.graph.saved_tensors_hooks(_drop, _refuse)
        with torch.enable_grad(), hooks, mode:
            y = run(x.detach().requires_grad_(True))
        self._resting[micro_batch] = mode.outputs
        self._leaving.append(list(mode.copies.values()))
        self._boundaries.awaits(self._stage.index, *mode.copies.values())
        while len(self._leaving) > 1:
            events = self._leaving.pop(0)
            with self._waiting(BOUNDARIES_ACROSS) if self.device.separate else nullcontext():
                for event in events:
                    event.synchronize()  # sync: the outputs of the micro-batch before
        return y.detach()

    def begin(self, micro_batch: int) -> None:
        self._arriving[micro_batch] = self._given(micro_batch)

    def again(self, run: Run, x: torch.Tensor, micro_batch: int, flat: torch.Tensor | None) -> torch.Tensor:
        given = self._arriving.pop(micro_batch) if self.device.separate else self._given(micro_batch)
        with GivingBack(given, self._resting.pop(micro_batch), self._stage, flat):
            return run(x)

    def forget(self) -> None:
        self._resting.clear()
        self._leaving.clear()
        self._arriving.clear()

    def place(self, micro_batch: int, operator: int) -> Span:
        """Returns the span in the arena where an operator's output is kept."""
        return self._boundaries.output(self._stage.index, micro_batch, operator)

    def _given(self, micro_batch: int) -> Arrived:
        """Returns the kept values of every operator: views of host memory, or copies under way to a device with its own
        memory."""
        arrived: Arrived = {}
        for index, (values, _) in sorted(self._resting[micro_batch].items()):
            span, events = self.place(micro_batch, index), list[Event]()
            arrived[index] = [self._value(value, span, events) for value in values], events
            self._boundaries.awaits(self._stage.index, *events)
        return arrived

    def _value(self, value: Any, span: Span, events: list[Event]) -> Any:
        if not isinstance(value, _Resting):
            return value
        host = value.view(self.memory, span)
        if not self.device.separate:
            return host
        target = self.device.empty_like(host)
        events.append(self.device.upload(host, target))
        return target


class _Keeping(Operators):
    """Copies outputs as soon as they are computed. An operator that writes into a tensor waits until its copy is over."""

    def __init__(self, swap: Swap, micro_batch: int) -> None:
        super().__init__()
        self.outputs: Outputs = {}
        self._swap, self._micro_batch = swap, micro_batch
        self.copies: dict[int, Event] = {}  # by storage; the last one of a storage is behind its others

    def operator(self, index: int, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        spec = self._swap.chosen.get(index)
        if spec is not None:
            if spec.kind != kind:
                raise UsageError(
                    f"operator {index} of a stage is {kind} here, the plan was made for {spec.name}",
                    hint="set offload.activations=recompute, which asks nothing of a model's operators",
                )
            self.outputs[index] = self._keep(spec, out)
        return out

    def beside(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.copies and func._schema.is_mutable:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata in self.copies:
                    self.copies[leaf.untyped_storage()._cdata].wait()
        return func(*args, **kwargs)

    def _keep(self, spec: OperatorSpec, out: Any) -> Output:
        span, end = self._swap.place(self._micro_batch, spec.index), 0
        values: list[Any] = []
        for value in out if isinstance(out, tuple) else (out,):
            if not isinstance(value, torch.Tensor) or value.numel() * value.element_size() < OUTPUT_ALIGN:
                # a number, or as good as one (a kernel's random state): it stays where it is
                values.append(value.clone() if isinstance(value, torch.Tensor) else value)
                continue
            resting = _Resting(end, value.dtype, value.shape, torch.empty_like(value, device="meta").stride())
            size = value.numel() * value.element_size()
            if end + size > span.size:
                raise UsageError(
                    f"the output of {spec.name} takes {end + size} bytes here, planned {span.size}",
                    hint="set offload.activations=recompute, which keeps no outputs",
                )
            values.append(resting)
            self._copy(value, resting.view(self._swap.memory, span))
            end = align_up(end + size, OUTPUT_ALIGN)
        return values, isinstance(out, tuple)

    def _copy(self, value: torch.Tensor, host: torch.Tensor) -> None:
        if self._swap.device.separate:
            self.copies[value.untyped_storage()._cdata] = self._swap.device.download(value, host)
        else:
            host.copy_(value)


class GivingBack(Sparing):
    """Returns what was kept instead of computing it, once it has arrived."""

    def __init__(self, given: Arrived, outputs: Outputs, stage: StageSpec, flat: torch.Tensor | None) -> None:
        super().__init__(stage, flat)
        self._given, self._outputs = given, outputs

    def operator(self, index: int, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        if index not in self._outputs:
            return super().operator(index, kind, func, args, kwargs)
        values, events = self._given.pop(index)
        for event in events:
            event.wait()
        return tuple(values) if self._outputs[index][1] else values[0]


def _drop(tensor: torch.Tensor) -> None:
    """Drops what autograd would save in a forward that is recomputed."""


def _refuse(nothing: None) -> NoReturn:
    raise AssertionError("a forward that is recomputed has no backward of its own")
