"""Keeps each stage's boundary (its input for all rows) as tensors, copied to where the ledger keeps it, or to a place of its
own in the device's memory.

Outputs of operators that the plan keeps in RAM or on the ssd are stored with it: each micro-batch's after its own rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..core.errors import UsageError
from ..core.units import align_up
from ..planner.boundary_layout import RECORD_ALIGN, BoundaryLayout, device_boundaries, uneven_layout
from ..planner.boundary_ledger import BoundaryLedger, Wait
from ..spec.micro_batch import MicroBatch
from ..spec.model import ModelSpec
from ..spec.plan import Plan, Span
from ..swap.daemon import SwapDaemon
from .devices.base import Device, Event
from .host_memory import HostMemory


@dataclass(frozen=True, slots=True)
class _Kind:
    shape: torch.Size
    dtype: torch.dtype
    layout: BoundaryLayout
    parts: tuple[MicroBatch, ...]

    def of(self, number: int) -> torch.Size:
        """Returns the shape of one micro-batch's rows."""
        part = self.parts[number]
        return torch.Size((part.end - part.first, part.width, *self.shape[2:]))


class Boundaries:
    """Keeps boundaries: in forward `stash`, or `room` and `rows` to be filled, then `seal`. In backward `take`, then `drop`."""

    def __init__(self, *, model: ModelSpec, plan: Plan, daemon: SwapDaemon, memory: HostMemory, device: Device) -> None:
        self.model, self.plan, self.memory = model, plan, memory
        resting = [stage.stage for stage in plan.stages if stage.boundary == "gpu"]
        self._places, size = device_boundaries(model, plan.group, resting)
        self._there = device.empty(size) if size else None
        self.ledger = BoundaryLedger(plan=plan, transfers=daemon)
        self._kinds: dict[int, _Kind] = {}
        self._unsealed: set[int] = set()
        self._copies: dict[int, deque[Event]] = {}  # by stage: copies into its place in forward, out of it in backward
        self._after = deque[tuple[int, Callable[[int], None]]]()  # stages, and what to do after their copies

    def stash(self, stage: int, boundary: torch.Tensor, parts: tuple[MicroBatch, ...], wait_until: Wait) -> None:
        """Keeps a copy of `boundary` (host memory). The copy is complete, unless outputs will be stored beside it."""
        self.room(stage, boundary, parts, wait_until)
        for number, part in enumerate(parts):
            self.rows(stage, number).copy_(part.of(boundary))
        if not self.plan.stages[stage].kept:
            self.seal(stage)

    def room(self, stage: int, boundary: torch.Tensor, parts: tuple[MicroBatch, ...], wait_until: Wait) -> None:
        """Finds a place for `boundary` and the outputs beside it. It is filled micro-batch by micro-batch until it is
        sealed."""
        layout = self._layout(stage, boundary, parts)
        # The boundary of the step before, until it was read.
        wait_until(lambda: stage not in self.ledger.kept, "a slot for a boundary")
        span = self.ledger.room(stage, wait_until)
        planned = self.model.widest_bytes_per_token * self.plan.group.tokens if span is None else span.size
        if layout.size > align_up(planned, RECORD_ALIGN):
            raise UsageError(
                f"the boundary of stage {stage} takes {layout.size} bytes, but the plan has {planned}",
                hint="its dtype is wider than precision.compute: this model family is not supported yet",
            )
        self.ledger.stashed(stage, span, layout.size)
        self._kinds[stage] = _Kind(boundary.shape, boundary.dtype, layout, parts)
        self._unsealed.add(stage)

    def rows(self, stage: int, number: int) -> torch.Tensor:
        """Returns the rows of one micro-batch where they are kept. Valid between `room` or `take` and `seal` or `drop`."""
        kind = self._kinds[stage]
        shape, within = kind.of(number), kind.layout.begins(number)
        size = shape.numel() * kind.dtype.itemsize
        if self._there is not None and stage in self._places:
            begin = self._places[stage] + within
            return self._there[begin : begin + size].view(kind.dtype).view(shape)
        begin = (self.ledger.where(stage).offset + within) // kind.dtype.itemsize
        # Without `data`, a write to any other part of the arena would count as a change of these rows.
        return self.memory.whole(kind.dtype)[begin : begin + shape.numel()].data.view(shape)

    def awaits(self, stage: int, *copies: Event) -> None:
        """Notes copies between the device and the place of the stage's boundary."""
        self._copies.setdefault(stage, deque()).extend(copies)

    def seal(self, stage: int) -> None:
        """Notes that the stage's forward is submitted. The boundary is complete once its copies are over."""
        if stage in self._unsealed:
            self._unsealed.remove(stage)
            self._follow(stage, self.ledger.seal)

    def advance(self) -> None:
        """Handles copies that have ended, and then the ledger's own work. Never waits."""
        while self._after and self._are_over(self._after[0][0]):
            stage, follows = self._after.popleft()
            self._copies.pop(stage, None)
            follows(stage)
        self.ledger.advance()

    def _are_over(self, stage: int) -> bool:
        """Tells whether the stage's copies have ended. Finished copies are not asked again, because this runs after every
        layer."""
        left = self._copies.get(stage, ())
        while left and left[0].done():
            left.popleft()
        return not left

    def forget(self, wait_until: Wait) -> None:
        """Drops every boundary. No copy may be under way."""
        self._after.clear()
        self._copies.clear()
        self._unsealed.clear()
        self.ledger.forget(wait_until)

    def _follow(self, stage: int, follows: Callable[[int], None]) -> None:
        self._after.append((stage, follows))
        self.advance()

    def take(self, stage: int, wait_until: Wait) -> list[torch.Tensor]:
        """Returns the boundary as stashed, micro-batch by micro-batch, valid until it is dropped."""
        self.ledger.ready(stage, wait_until)
        return [self.rows(stage, number) for number in range(len(self._kinds[stage].parts))]

    def output(self, stage: int, micro_batch: int, operator: int) -> Span:
        """Returns where in the arena an operator's output rests. Valid between stash and seal, and between take and drop."""
        within = self._kinds[stage].layout.output(micro_batch, operator)
        return Span(offset=self.ledger.where(stage).offset + within.offset, size=within.size)

    def output_size(self, stage: int, micro_batch: int, operator: int) -> int:
        return self._kinds[stage].layout.output(micro_batch, operator).size

    def output_begin(self, stage: int, micro_batch: int, operator: int) -> int:
        return self.ledger.where(stage).offset + self._kinds[stage].layout.begin(micro_batch, operator)

    def drop(self, stage: int) -> None:
        """Notes that the stage's backward is submitted. The boundary is freed once its copies are over."""
        self._follow(stage, self.ledger.drop)

    def leave(self, stage: int) -> None:
        """Does the same for a backward that another follows: the boundary stays at its home."""
        self._follow(stage, self.ledger.leave)

    def _layout(self, stage: int, boundary: torch.Tensor, parts: tuple[MicroBatch, ...]) -> BoundaryLayout:
        """Returns the layout of this boundary, which may be smaller than planned."""
        token = boundary[0, 0].numel() * boundary.element_size()
        numerics, kept = self.plan.numerics, self.plan.stages[stage].kept
        planned = 0 if numerics.padding == "step" else numerics.micro_batch_tokens
        return uneven_layout(self.model.stages[stage], kept, parts, token_bytes=token, planned=planned)
