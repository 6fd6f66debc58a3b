"""Count what a run writes to its drives, as a share of the writes they are rated for, beside what they have written already."""

from __future__ import annotations

from dataclasses import dataclass

from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.search import Found, timed
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan

from .room import Room

WORN = 0.3  # of what drives are rated for: a run that writes more is warned about


@dataclass(frozen=True, kw_only=True, slots=True)
class Writes:
    """Holds the bytes that a run writes to the drives of its store."""

    loading: int
    steps: int
    saving: int  # where it ends, beside the updates
    export: int  # 0 where the model goes to other drives

    @property
    def total(self) -> int:
        return self.loading + self.steps + self.saving + self.export


def writes_of(plan: Plan, room: Room, *, steps: float, resumed: bool = False) -> Writes:
    """Counts the writes of this many steps to the run's end: of a whole run, or of a `resumed` one, which loads nothing."""
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
    """Holds shares of rated writes."""

    run: float  # that the run takes, of the drive that is rated for least
    rated: int  # bytes of that drive
    before: float  # that the most worn drive has written, and will have after the run
    after: float

    @property
    def accepted(self) -> bool:
        """Tells whether the run takes little enough and brings no drive to its end. A drive past its end is nothing new."""
        return self.run <= WORN and not self.before < 1 < self.after


def wear_of(hardware: HardwareProfile, writes: Writes | None) -> Wear | None:
    """Returns the wear of writes that are spread evenly over the drives, each of which wears by itself; None where what is
    written or what any drive is rated for is not known."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Spared:
    """Holds what `offload.wear` kept from being written, and what that would have brought."""

    instead: str  # of what it would have been, in words
    per_step: int  # bytes
    faster: float  # a step of the fastest plan, as a share of its seconds


def spared_of(found: Found, plan: Plan, model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> Spared | None:
    """Compares `plan`, which was made of what a search found, with the fastest; None where that is the same or no faster."""
    if found.fastest is found.best:
        return None
    fastest, chosen = timed(found.fastest, model, hardware, request).predicted, plan.predicted
    faster, more = chosen.step_seconds / fastest.step_seconds - 1, fastest.written_per_step - chosen.written_per_step
    if faster <= 0 or more <= 0:
        return None
    most = max(sorted(fastest.written_by), key=lambda kind: fastest.written_by[kind] - chosen.written_by.get(kind, 0))
    swaps = _swapped(found.fastest.plan) > _swapped(plan)
    instead = "outputs are recomputed instead of swapped" if swaps else f"{most} stay in RAM"
    return Spared(instead=instead, per_step=more, faster=faster)


def _swapped(plan: Plan) -> int:
    """Counts the operators whose outputs go to the ssd, of all stages."""
    return sum(len(stage.kept) for stage in plan.stages if stage.boundary == "ssd")
