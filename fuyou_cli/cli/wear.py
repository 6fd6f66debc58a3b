"""What a run writes to its drives, and what that takes of the writes they are warranted for, beside what they have written
already."""

from __future__ import annotations

from dataclasses import dataclass

from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.plan import Plan

from .room import Room

WORN = 0.3  # of what drives are rated for: a run that writes more is not let pass without a word


@dataclass(frozen=True, kw_only=True, slots=True)
class Writes:
    """Bytes that a run writes to the drives of its store."""

    loading: int
    steps: int
    saving: int  # where it ends, beside the updates
    export: int  # 0 where the model goes to other drives

    @property
    def total(self) -> int:
        return self.loading + self.steps + self.saving + self.export


def writes_of(plan: Plan, room: Room, *, steps: float, resumed: bool = False) -> Writes:
    """Of this many steps to the run's end: of a whole run, or of a `resumed` one, which loads nothing."""
    from fuyou_cli.training.run_limits import loaded, saved_where_it_stops

    beside = any({"the store", "the exported model"} <= set(disk.what) for disk in room.disks)
    return Writes(
        loading=0 if resumed else loaded(plan),
        steps=round(steps * plan.predicted.written_per_step),
        saving=saved_where_it_stops(plan) if steps else 0,
        export=plan.predicted.export_bytes if beside else 0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Wear:
    """Shares of rated writes."""

    run: float  # that the run takes, of the drive that is rated for least
    rated: int  # bytes of that drive
    before: float  # that the most worn drive has written, and will have after the run
    after: float

    @property
    def ends_a_life(self) -> bool:
        """Whether a drive comes to the end of what it is rated for in this run. One past it is nothing new."""
        return self.before < 1 < self.after

    @property
    def accepted(self) -> bool:
        return self.run <= WORN and not self.ends_a_life


def wear_of(hardware: HardwareProfile, writes: Writes | None) -> Wear | None:
    """Of writes that are spread evenly over the drives, each of which wears by itself; None where what is written or what any
    drive is rated for is not known."""
    rated = [drive for drive in hardware.drives if drive.rated_bytes]
    if writes is None or not rated:
        return None
    each = writes.total / len(hardware.drives)
    least = min(drive.rated_bytes for drive in rated)
    worst = max(rated, key=lambda drive: (drive.used_bytes + each) / drive.rated_bytes)
    return Wear(
        run=each / least,
        rated=least,
        before=worst.used_bytes / worst.rated_bytes,
        after=(worst.used_bytes + each) / worst.rated_bytes,
    )
