"""Counts what a run writes to its drives, as a share of their rated writes, beside what they have written already."""

from __future__ import annotations

from dataclasses import dataclass

from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.search import SearchResult, timed
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan

from .room import Room

WORN = 0.3  # share of a drive's rated writes; fuyou warns about a run that writes more


@dataclass(frozen=True, kw_only=True, slots=True)
class Writes:
    """Holds the bytes that a run writes to the drives of its store."""

    loading: int
    steps: int
    saving: int  # saving at the end, beside the updates
    export: int  # 0 if the model goes to other drives

    @property
    def total(self) -> int:
        return self.loading + self.steps + self.saving + self.export


def writes_of(plan: Plan, room: Room, *, steps: float, resumed: bool = False) -> Writes:
    """Returns the writes of this many steps to the run's end. A `resumed` run loads nothing."""
    from fuyou_cli.training.length import loaded, saved_where_it_stops

    beside = any({"the store", "the exported model"} <= set(disk.what) for disk in room.disks)
    return Writes(
        loading=0 if resumed else loaded(plan),
        steps=round(steps * plan.predicted.written_per_step),
        saving=saved_where_it_stops(plan) if steps else 0,
        export=plan.predicted.export_bytes if beside else 0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Wear:
    """Holds shares of the drives' rated writes."""

    run: float  # what the run uses of the drive with the lowest rating
    rated: int  # bytes of that drive
    before: float  # what the most worn drive has written, before the run and after it
    after: float

    @property
    def accepted(self) -> bool:
        """Tells whether the run uses little enough and wears out no drive. A drive worn out before does not count."""
        return self.run <= WORN and not self.before < 1 < self.after


def wear_of(hardware: HardwareProfile, writes: Writes | None) -> Wear | None:
    """Returns the wear of writes spread evenly over the drives. Returns None if the writes or all ratings are unknown."""
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
    """Holds what `offload.wear` avoids writing, and what that writing would have gained."""

    instead: str  # what happens instead, in words
    per_step: int  # bytes
    faster: float  # extra time of this plan, as a share of the fastest plan's step


def spared_of(
    found: SearchResult, plan: Plan, model: ModelSpec, hardware: HardwareProfile, request: PlanRequest
) -> Spared | None:
    """Compares `plan`, made from a search's result, with the fastest plan. Returns None if they are the same or it is no
    faster."""
    if found.fastest is found.best:
        return None
    fastest, chosen = timed(found.fastest, model, hardware, request, costs=found.costs).predicted, plan.predicted
    faster, more = chosen.step_seconds / fastest.step_seconds - 1, fastest.written_per_step - chosen.written_per_step
    if faster <= 0 or more <= 0:
        return None
    most = max(sorted(fastest.written_by), key=lambda kind: fastest.written_by[kind] - chosen.written_by.get(kind, 0))
    swaps = _swapped(found.fastest.plan) > _swapped(plan)
    instead = "outputs are recomputed instead of swapped" if swaps else f"{most} stay in RAM"
    return Spared(instead=instead, per_step=more, faster=faster)


def _swapped(plan: Plan) -> int:
    """Counts the operators, over all stages, whose outputs go to the ssd."""
    return sum(len(stage.kept) for stage in plan.stages if stage.boundary == "ssd")
