"""What a run writes to its drives, and what that takes of the writes they are warranted for, beside what they have written
already."""

from __future__ import annotations

from dataclasses import dataclass

from fuyou_cli.planner.search import Found, timed
from fuyou_cli.planner.wishes import Wishes
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Spared:
    """What `offload.wear` kept from being written, and what that would have brought."""

    instead: str  # of what it would have been, in words
    per_step: int  # bytes
    faster: float  # a step of the fastest plan, as a share of its seconds
    each: int  # bytes that 1,000 of its steps write to each drive
    rated: bool  # whether anybody knows what a drive is rated for


def spared_of(found: Found, plan: Plan, model: ModelSpec, hardware: HardwareProfile, wishes: Wishes) -> Spared | None:
    """Beside `plan`, which was made of what a search found; None where the fastest plan is that one, or no faster."""
    if found.fastest is found.best:
        return None
    fastest, chosen = timed(found.fastest, model, hardware, wishes).predicted, plan.predicted
    faster, more = chosen.step_seconds / fastest.step_seconds - 1, fastest.written_per_step - chosen.written_per_step
    if faster <= 0 or more <= 0:
        return None
    return Spared(
        instead=_instead(found.fastest.plan, plan),
        per_step=more,
        faster=faster,
        each=round(1000 * fastest.written_per_step / max(1, len(hardware.drives))),
        rated=any(drive.rated_bytes for drive in hardware.drives),
    )


def _instead(fastest: Plan, plan: Plan) -> str:
    """What most of the bytes would have been."""
    if _swapping(fastest) > _swapping(plan):
        return "outputs are recomputed instead of swapped"
    now, then = plan.predicted.written_by, fastest.predicted.written_by
    most = max(sorted(then), key=lambda kind: then[kind] - now.get(kind, 0))
    return f"{most} stay in RAM"


def _swapping(plan: Plan) -> int:
    """Operators whose outputs go to the ssd, of all stages."""
    return sum(len(stage.kept) for stage in plan.stages if stage.boundary == "ssd")
