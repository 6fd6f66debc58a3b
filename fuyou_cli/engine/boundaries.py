"""The boundary of each stage (its input, the whole step's batch) kept from forward to backward: in RAM or on the ssd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..core.errors import UsageError
from ..core.units import align_up
from ..spec.plan import Plan, Span
from ..swap.daemon import SwapDaemon
from .host_memory import HostMemory

_WRITE_PRIORITY = 1  # behind weights being waited for, before updates: it frees a slot
_READ_PRIORITY = 0
_ALIGN = 4096


@dataclass(slots=True)
class _Kept:
    shape: torch.Size
    dtype: torch.dtype
    span: Span | None  # None: on the ssd only
    write: int | None = None
    read: int | None = None


class Boundaries:
    """Stash in forward, take in backward, drop when the stage's backward is over."""

    def __init__(self, *, plan: Plan, daemon: SwapDaemon, memory: HostMemory) -> None:
        self.plan, self.daemon, self.memory = plan, daemon, memory
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

    def stash(self, stage: int, boundary: torch.Tensor, wait_until: Callable[[Callable[[], bool], str], None]) -> None:
        """Keeps a copy of `boundary` (host memory)."""
        plan = self.plan.stages[stage]
        span = plan.boundary_ram
        if span is None:
            wait_until(lambda: bool(self.free), "a slot for a boundary")
            span = self.free.pop()
        size = boundary.numel() * boundary.element_size()
        if size > span.size:
            raise UsageError(
                f"the boundary of stage {stage} takes {size} bytes, planned {span.size}",
                hint="its dtype is wider than precision.compute: this model family is not supported yet",
            )
        kept = _Kept(shape=boundary.shape, dtype=boundary.dtype, span=span)
        self._view(kept).copy_(boundary)
        if plan.boundary_ram is None:
            assert plan.boundary_extent is not None
            kept.write = self.daemon.write(
                span.offset, plan.boundary_extent.offset, align_up(size, _ALIGN), priority=_WRITE_PRIORITY, label=stage
            )
        self.kept[stage] = kept

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
        size = align_up(kept.shape.numel() * kept.dtype.itemsize, _ALIGN)
        kept.read = self.daemon.read(kept.span.offset, extent.offset, size, priority=_READ_PRIORITY, label=stage)
        return True

    def take(self, stage: int, wait_until: Callable[[Callable[[], bool], str], None]) -> torch.Tensor:
        """The boundary as stashed, valid until it is dropped."""
        kept = self.kept[stage]
        wait_until(lambda: self.try_prefetch(stage) and kept.read is None, "a boundary")
        return self._view(kept)

    def drop(self, stage: int) -> None:
        kept = self.kept.pop(stage)
        if self.plan.stages[stage].boundary_ram is None:
            assert kept.span is not None
            self.free.append(kept.span)

    def forget(self, wait_until: Callable[[Callable[[], bool], str], None]) -> None:
        """Drops every boundary once nothing moves any more."""
        wait_until(lambda: all(kept.write is None and kept.read is None for kept in self.kept.values()), "boundaries")
        for stage in list(self.kept):
            kept = self.kept.pop(stage)
            if self.plan.stages[stage].boundary_ram is None and kept.span is not None:
                self.free.append(kept.span)

    def _view(self, kept: _Kept) -> torch.Tensor:
        assert kept.span is not None
        return self.memory.tensor(kept.span, kept.dtype, kept.shape.numel()).view(kept.shape)
