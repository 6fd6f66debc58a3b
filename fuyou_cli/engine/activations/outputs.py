"""Keeps outputs of operators from forward to backward. Forward puts them in their places. The recompute gets them back and
computes only what was not kept.

Each output is given back once, so the model's code may change it in place. Forward runs as the recompute will
(`without_saving`). An output is never a parameter, and two outputs never share memory, so nothing is kept twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from ...core.errors import UsageError
from ...core.units import align_up
from ...planner.boundary_layout import OUTPUT_ALIGN
from ...planner.device import BOUNDARIES_ACROSS
from ...spec.model import OperatorSpec, StageSpec
from ..devices.base import Event
from ..moves import Waiting
from .operators import Operators, name_of, product_into
from .recompute import Run, Sparing, without_saving


@dataclass(frozen=True, slots=True)
class Resting:
    """Describes one tensor of a kept output. It begins `offset` bytes after the output's start."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns a view with the tensor's strides. `memory`: the output's (uint8, 1-D)."""
        size = self.shape.numel() * self.dtype.itemsize
        return memory[self.offset : self.offset + size].view(self.dtype).as_strided(self.shape, self.stride)


Output = tuple[list[Any], bool]  # descriptions of kept tensors, other values as they are; whether the operator returns a tuple
Leaving = list[list[Event]]  # copies to the host, by micro-batch, over all stages in order
Outputs = dict[int, Output]  # by operator
Arrived = dict[int, tuple[list[Any], list[Event]]]  # by operator: values ready for compute, and copies to wait for


class Place(Protocol):
    """Defines where outputs of one stage are kept."""

    direct: bool  # compute may write there directly, so that a product needs no copy

    def memory(self, micro_batch: int, operator: int) -> torch.Tensor:
        """Returns an output's memory (uint8, 1-D)."""
        ...

    def put(self, value: torch.Tensor, there: torch.Tensor) -> Event | None:
        """Copies a computed tensor. Returns the end of the copy if compute does not wait for it."""
        ...

    def take(self, there: torch.Tensor) -> tuple[torch.Tensor, Event | None]:
        """Returns the tensor in memory that backward computes with, and the end of the copy to that memory, if there is one."""
        ...


class KeptOutputs:
    """Implements `Activations` for a stage that keeps outputs. Remembers their layouts from forward to backward. `places`: by
    operator; `began`: called with the stage and copies between the device and where its boundary is kept."""

    as_backward = True

    def __init__(
        self,
        stage: StageSpec,
        places: Mapping[int, Place],
        *,
        began: Callable[..., None],
        waiting: Waiting,
        leaving: Leaving,
        separate: bool,
    ) -> None:
        self._stage, self.places, self._began, self._waiting, self._separate = stage, places, began, waiting, separate
        self.chosen = {operator.index: operator for operator in stage.operators if operator.index in places}
        self._resting: dict[int, Outputs] = {}  # by micro-batch
        self._leaving = leaving
        self._arriving: dict[int, Arrived] = {}

    def forward(self, run: Run, x: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """Runs the forward. At its end the copies of the previous micro-batch have ended."""
        mode = _Keeping(self, micro_batch)
        with mode:
            y = without_saving(run, x)
        self._resting[micro_batch] = mode.outputs
        self._leaving.append(list(mode.copies.values()))
        self._began(self._stage.index, *mode.copies.values())
        while len(self._leaving) > 1:
            events = self._leaving.pop(0)
            with self._waiting(BOUNDARIES_ACROSS) if events else nullcontext():
                for event in events:
                    event.synchronize()  # sync: the outputs of the previous micro-batch
        return y

    def begin(self, micro_batch: int) -> None:
        self._arriving[micro_batch] = self._given(micro_batch)

    def again(self, run: Run, x: torch.Tensor, micro_batch: int, flat: torch.Tensor | None) -> torch.Tensor:
        given = self._arriving.pop(micro_batch) if self._separate else self._given(micro_batch)
        with GivingBack(given, self._resting.pop(micro_batch), self._stage, flat):
            return run(x)

    def forget(self) -> None:
        self._resting.clear()
        self._leaving.clear()
        self._arriving.clear()

    def _given(self, micro_batch: int) -> Arrived:
        """Returns the kept values of every operator, where backward computes with them. Copies to there may be under way."""
        arrived: Arrived = {}
        for index, (values, _) in sorted(self._resting[micro_batch].items()):
            place, events = self.places[index], list[Event]()
            memory = place.memory(micro_batch, index)
            here = list[Any](values)
            for number, value in enumerate(values):
                if isinstance(value, Resting):
                    here[number], copied = place.take(value.view(memory))
                    events += [copied] if copied is not None else []
            arrived[index] = here, events
            self._began(self._stage.index, *events)
        return arrived


class _Keeping(Operators):
    """Copies outputs as soon as they are computed. An operator that writes into a tensor waits until its copy has ended.
    Products that are kept in direct places are computed there. The model's code then computes with the kept value itself and
    must not change it."""

    def __init__(self, stage: KeptOutputs, micro_batch: int) -> None:
        super().__init__()
        self.outputs: Outputs = {}
        self._stage, self._micro_batch = stage, micro_batch
        self.copies: dict[int, Event] = {}  # by storage; the last copy of a storage ends after its others
        self._computed_there: dict[int, OperatorSpec] = {}  # by storage: products computed in their place

    def operator(self, index: int, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        spec = self._stage.chosen.get(index)
        if spec is None:
            return func(*args, **kwargs)
        if spec.kind != kind:
            raise UsageError(
                f"operator {index} of a stage is {kind}, but the plan was made for {spec.name}",
                hint="set offload.activations=recompute, which does not depend on the model's operators",
            )
        place, out = self._stage.places[index], None
        if place.direct and not spec.overwritten:
            out = product_into(func, args, kwargs, place.memory(self._micro_batch, index))
        if out is None:
            out = func(*args, **kwargs)
            self.outputs[index] = self._keep(spec, out)
        else:
            self.outputs[index] = [Resting(0, out.dtype, out.shape, out.stride())], False
            self._computed_there[out.untyped_storage()._cdata] = spec
        return out

    def beside(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._schema.is_mutable and (self.copies or self._computed_there):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    self._before_change(leaf.untyped_storage()._cdata, func)
        return func(*args, **kwargs)

    def _before_change(self, storage: int, func: Any) -> None:
        """Makes sure that the kept copy of this storage stays as it is."""
        if storage in self.copies:
            self.copies[storage].wait()
        if storage in self._computed_there:
            raise UsageError(
                f"{name_of(func)} changes the output of {self._computed_there[storage].name}, or one beside it, in place, "
                "which the plan did not expect",
                hint="set offload.activations=recompute, which does not depend on the model's operators",
            )

    def _keep(self, spec: OperatorSpec, out: Any) -> Output:
        place, end = self._stage.places[spec.index], 0
        memory = place.memory(self._micro_batch, spec.index)
        values: list[Any] = []
        for value in out if isinstance(out, tuple) else (out,):
            if not isinstance(value, torch.Tensor) or value.numel() * value.element_size() < OUTPUT_ALIGN:
                # A number, or a small tensor like a kernel's random state: it stays where it is.
                values.append(value.clone() if isinstance(value, torch.Tensor) else value)
                continue
            resting = Resting(end, value.dtype, value.shape, torch.empty_like(value, device="meta").stride())
            size = value.numel() * value.element_size()
            if end + size > memory.numel():
                raise UsageError(
                    f"the output of {spec.name} takes {end + size} bytes, but the plan has {memory.numel()}",
                    hint="set offload.activations=recompute, which keeps no outputs",
                )
            values.append(resting)
            copied = place.put(value, resting.view(memory))
            if copied is not None:
                self.copies[value.untyped_storage()._cdata] = copied
            end = align_up(end + size, OUTPUT_ALIGN)
        return values, isinstance(out, tuple)


class GivingBack(Sparing):
    """Returns a kept output instead of computing it, once it has arrived."""

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
