"""Keeps outputs of operators in the device's memory from forward to backward, so that they are never copied to the host. One
block of memory for all of them is allocated when a run begins."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...planner.boundary_layout import BoundaryLayout, device_layouts
from ...spec.model import ModelSpec
from ...spec.plan import Plan
from ..devices.base import Device, Event
from .outputs import Place
from .resting import Resting, Views


class Keep:
    """Implements `Place` for one stage. `memory`: for its outputs for a sweep's rows (uint8, 1-D). Compute writes and reads it
    in order, so nothing waits."""

    direct, waits = True, False

    def __init__(self, memory: torch.Tensor, layout: BoundaryLayout) -> None:
        self._layout, self._begin = layout, int(memory.storage_offset())
        self._views = Views(memory.view)

    def room(self, micro_batch: int, operator: int) -> int:
        return self._layout.outputs[operator].size

    def there(self, micro_batch: int, operator: int, resting: Resting) -> torch.Tensor:
        return self._views.at(self._begin + self._layout.begin(micro_batch, operator), resting)

    def put(self, value: torch.Tensor, there: torch.Tensor) -> Event | None:
        there.copy_(value)
        return None

    def put_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Event]:
        raise AssertionError("compute copies outputs to the device's own memory")

    def arriving(self, there: torch.Tensor) -> torch.Tensor:
        return there

    def bring_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Event]:
        raise AssertionError("compute reads outputs in the device's own memory")


def keep_places(model: ModelSpec, plan: Plan, device: Device) -> list[dict[int, Place]]:
    """Allocates the plan's memory for outputs on the device. Returns their places by stage and operator."""
    every = tuple(() if model.compiled else stage.kept_there for stage in plan.stages)  # compute allocates a graph
    layouts = device_layouts(model, plan.group, every)
    size = sum(layout.size for _, layout in layouts)
    if not size:
        return [{} for _ in layouts]
    memory = device.empty(size)
    places: list[Place] = [Keep(memory[begin : begin + layout.size], layout) for begin, layout in layouts]
    return [dict.fromkeys(kept, place) for kept, place in zip(every, places, strict=True)]
