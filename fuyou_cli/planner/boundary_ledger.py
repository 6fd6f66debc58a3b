"""Keeps track of boundaries: where each stage's input is between forward and backward, and what is being moved.

Like the residency ledger it moves no bytes itself, so the executor and the simulator follow the same rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..core.units import align_up
from ..spec.plan import Plan, Span
from .records import Transfers

_WRITE_PRIORITY = 1  # after weights that compute waits for, before updates: the write frees a slot
_READ_PRIORITY = 0
_ALIGN = 4096

Wait = Callable[[Callable[[], bool], str], None]


@dataclass(slots=True)
class KeptBoundary:
    size: int
    span: Span | None  # None: on the ssd only, or on the device
    sealed: bool = False  # the boundary was complete
    write: int | None = None
    read: int | None = None


class BoundaryLedger:
    """Keeps track of boundaries. Forward uses `room`, `stashed` and `seal`; backward uses `ready`; `drop` ends a stage's
    backward."""

    def __init__(self, *, plan: Plan, transfers: Transfers) -> None:
        self.plan, self.transfers = plan, transfers
        self.free = list(plan.boundary_slots)
        self.kept: dict[int, KeptBoundary] = {}
        self.moving: set[int] = set()

    def advance(self) -> None:
        """Notices finished transfers. A boundary that was written frees its slot. Never waits."""
        for stage in sorted(self.moving):
            kept = self.kept[stage]
            if kept.write is not None and self.transfers.poll(kept.write) is not None:
                kept.write = None
                assert kept.span is not None
                self.free.append(kept.span)
                kept.span = None
            if kept.read is not None and self.transfers.poll(kept.read) is not None:
                kept.read = None
            if kept.write is None and kept.read is None:
                self.moving.discard(stage)

    def room(self, stage: int, wait_until: Wait) -> Span | None:
        """Returns where the boundary goes: to its home in RAM, or into a slot. None: it stays on the device."""
        span = self.plan.stages[stage].boundary_ram
        if span is None and self.plan.stages[stage].boundary == "ssd":
            wait_until(lambda: bool(self.free), "a slot for a boundary")
            span = self.free.pop()
        return span

    def stashed(self, stage: int, span: Span | None, size: int) -> None:
        """Notes that the boundary's `size` bytes belong in `span`. The bytes are there when `seal` is called."""
        self.kept[stage] = KeptBoundary(size=align_up(size, _ALIGN), span=span)

    def seal(self, stage: int) -> None:
        """Notes that the boundary is complete. Starts writing it if its home is on the ssd."""
        plan, kept = self.plan.stages[stage], self.kept[stage]
        kept.sealed = True
        if plan.boundary_extent is not None:
            self.moving.add(stage)
            kept.write = self.transfers.write(
                self.where(stage).offset, plan.boundary_extent.offset, kept.size, priority=_WRITE_PRIORITY, label=stage
            )

    def try_prefetch(self, stage: int) -> bool:
        """Starts reading a boundary from the ssd. Returns False if no slot is free, or if the boundary is still being copied or
        written."""
        kept = self.kept[stage]
        if not kept.sealed or kept.write is not None:
            return False
        extent = self.plan.stages[stage].boundary_extent
        if kept.span is not None or extent is None:
            return True
        if not self.free:
            return False
        kept.span = self.free.pop()
        self.moving.add(stage)
        kept.read = self.transfers.read(kept.span.offset, extent.offset, kept.size, priority=_READ_PRIORITY, label=stage)
        return True

    def ready(self, stage: int, wait_until: Wait) -> None:
        """Waits until the boundary is in memory again. It stays there until it is dropped."""
        wait_until(lambda: self.try_prefetch(stage) and self.kept[stage].read is None, "a boundary")

    def where(self, stage: int) -> Span:
        """Returns the boundary's span in the arena. Valid between `stashed` and `seal`, and between `ready` and `drop`."""
        span = self.kept[stage].span
        assert span is not None
        return span

    def drop(self, stage: int) -> None:
        """Frees the boundary: nothing needs it any more."""
        kept = self.kept.pop(stage)
        if self.plan.stages[stage].boundary_ram is None and kept.span is not None:
            self.free.append(kept.span)

    def leave(self, stage: int) -> None:
        """Ends a backward that another follows. A boundary from the ssd gives up its slot, and is read again."""
        kept = self.kept[stage]
        if self.plan.stages[stage].boundary_extent is not None:
            assert kept.span is not None
            self.free.append(kept.span)
            kept.span = None

    def forget(self, wait_until: Wait) -> None:
        """Drops every boundary, after waiting for all transfers."""
        wait_until(lambda: all(kept.write is None and kept.read is None for kept in self.kept.values()), "boundaries")
        for stage in list(self.kept):
            self.drop(stage)
