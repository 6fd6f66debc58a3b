"""The boundary of each stage (its input, the whole step's batch) kept from forward to backward: in RAM or on the ssd.

With it rest the outputs of the operators that the plan keeps (`kept_outputs`), each micro-batch's behind its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..core.errors import UsageError
from ..core.units import align_up
from ..planner.boundary import RECORD_ALIGN, BoundaryLayout, boundary_layout
from ..spec.model import ModelSpec
from ..spec.plan import Plan, Span
from ..swap.daemon import SwapDaemon
from .host_memory import HostMemory

_WRITE_PRIORITY = 1  # behind weights being waited for, before updates: it frees a slot
_READ_PRIORITY = 0

WaitUntil = Callable[[Callable[[], bool], str], None]


@dataclass(slots=True)
class _Kept:
    shape: torch.Size
    dtype: torch.dtype
    layout: BoundaryLayout
    span: Span | None  # None: on the ssd only
    write: int | None = None
    read: int | None = None


class Boundaries:
    """Stash in forward and seal when the stage's forward is over; take in backward, drop when that is over."""

    def __init__(self, *, model: ModelSpec, plan: Plan, daemon: SwapDaemon, memory: HostMemory) -> None:
        self.model, self.plan, self.daemon, self.memory = model, plan, daemon, memory
        self.free = list(plan.boundary_slots)
        self.kept: dict[int, _Kept] = {}

    def advance(self) -> None:
        """Notices finished transfers; a written boundary gives its slot back. Never waits."""
        for kept in self.kept.values():
            if kept.write is not None and self.daemon.poll(kept.write) is not None:
                kept.write = None
                assert kept.span is not None
                self.free.append(kept.span)
                kept.span = None
            if kept.read is not None and self.daemon.poll(kept.read) is not None:
                kept.read = None

    def stash(self, stage: int, boundary: torch.Tensor, wait_until: WaitUntil) -> None:
        """Keeps a copy of `boundary` (host memory). Outputs may be put beside it until it is sealed."""
        plan = self.plan.stages[stage]
        layout = self._layout(stage, boundary)
        span = plan.boundary_ram
        if span is None:
            wait_until(lambda: bool(self.free), "a slot for a boundary")
            span = self.free.pop()
        if layout.size > align_up(span.size, RECORD_ALIGN):
            raise UsageError(
                f"the boundary of stage {stage} takes {layout.size} bytes, planned {span.size}",
                hint="its dtype is wider than precision.compute: this model family is not supported yet",
            )
        kept = self.kept[stage] = _Kept(shape=boundary.shape, dtype=boundary.dtype, layout=layout, span=span)
        for number, rows in enumerate(boundary.split(self.plan.numerics.micro_batch_size)):
            self._rows(kept, number).copy_(rows)
        if not plan.kept:
            self._begin_write(stage, kept)

    def seal(self, stage: int) -> None:
        """The stage's forward is over: every output is in its place."""
        if self.plan.stages[stage].kept:
            self._begin_write(stage, self.kept[stage])

    def _begin_write(self, stage: int, kept: _Kept) -> None:
        plan = self.plan.stages[stage]
        if plan.boundary_ram is None:
            assert plan.boundary_extent is not None and kept.span is not None
            kept.write = self.daemon.write(
                kept.span.offset, plan.boundary_extent.offset, kept.layout.size, priority=_WRITE_PRIORITY, label=stage
            )

    def try_prefetch(self, stage: int) -> bool:
        """Starts reading a boundary that is on the ssd. False: no slot is free, or it is still being written."""
        kept = self.kept[stage]
        if kept.write is not None:
            return False
        if kept.span is not None:
            return True
        if not self.free:
            return False
        extent = self.plan.stages[stage].boundary_extent
        assert extent is not None
        kept.span = self.free.pop()
        kept.read = self.daemon.read(kept.span.offset, extent.offset, kept.layout.size, priority=_READ_PRIORITY, label=stage)
        return True

    def take(self, stage: int, wait_until: WaitUntil) -> list[torch.Tensor]:
        """The boundary as stashed, micro-batch by micro-batch, valid until it is dropped."""
        kept = self.kept[stage]
        wait_until(lambda: self.try_prefetch(stage) and kept.read is None, "a boundary")
        return [self._rows(kept, number) for number in range(-(-kept.shape[0] // self.plan.numerics.micro_batch_size))]

    def output(self, stage: int, micro_batch: int, operator: int) -> Span:
        """Where in the arena an operator's output rests, between stash and seal and between take and drop."""
        kept = self.kept[stage]
        assert kept.span is not None
        within = kept.layout.output(micro_batch, operator)
        return Span(offset=kept.span.offset + within.offset, size=within.size)

    def drop(self, stage: int) -> None:
        kept = self.kept.pop(stage)
        if self.plan.stages[stage].boundary_ram is None:
            assert kept.span is not None
            self.free.append(kept.span)

    def forget(self, wait_until: WaitUntil) -> None:
        """Drops every boundary once nothing moves any more."""
        wait_until(lambda: all(kept.write is None and kept.read is None for kept in self.kept.values()), "boundaries")
        for stage in list(self.kept):
            kept = self.kept.pop(stage)
            if self.plan.stages[stage].boundary_ram is None and kept.span is not None:
                self.free.append(kept.span)

    def _layout(self, stage: int, boundary: torch.Tensor) -> BoundaryLayout:
        """Of this boundary, which may be smaller than planned."""
        return boundary_layout(
            self.model.stages[stage],
            self.plan.stages[stage].kept,
            rows=boundary.shape[0],
            row_bytes=boundary[0].numel() * boundary.element_size(),
            micro_batch_size=self.plan.numerics.micro_batch_size,
        )

    def _rows(self, kept: _Kept, number: int) -> torch.Tensor:
        """One micro-batch's rows."""
        assert kept.span is not None
        micro = self.plan.numerics.micro_batch_size
        shape = torch.Size((min(micro, kept.shape[0] - number * micro), *kept.shape[1:]))
        size = shape.numel() * kept.dtype.itemsize
        span = Span(offset=kept.span.offset + number * kept.layout.record, size=size)
        return self.memory.tensor(span, kept.dtype).view(shape)
