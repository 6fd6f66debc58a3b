"""Plans several ranks that train one model together, on the cards of one box or on several boxes: what they gain beside one,
what keeps them from gaining more, and whether two boxes like a plan's own would help."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from fuyou_cli.core.errors import FuyouError, PlanError, UsageError
from fuyou_cli.core.units import brief
from fuyou_cli.machine.described import Box
from fuyou_cli.planner.ring import RingTimeline, of_other_ranks
from fuyou_cli.recipe.load import LoadedRecipe
from fuyou_cli.spec.hardware import Network
from fuyou_cli.training.alike import are_replicas, refuse_keys
from fuyou_cli.training.plan_step import halves, plan, plan_ranks, seconds_of_all, simulated
from fuyou_cli.training.prepare import Planned, StoreDisks, unheard
from fuyou_cli.training.state.resume import REFUSED

from .facts import GAIN, Room, TwoBoxes, plan_problems, room_of
from .planning import Progress, Say, inspected_for_plan, waits_for_drives

_MUCH = 0.1  # share of a step that ranks wait for one another, from which the reason is told
_FAST = 10  # times as fast a link, to see whether it binds
TWO_BOXES = Network(boxes=2, link_name="10GbE")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """Holds the plans of all ranks, and their step. `alone`: the plan of one rank that has a box and its card for itself; None
    if that does not fit."""

    network: Network
    ranks: tuple[Planned, ...]
    rooms: tuple[Room, ...]
    timeline: RingTimeline
    alone: Planned | None

    @property
    def step_seconds(self) -> float:
        return seconds_of_all(self.ranks, self.timeline)

    @property
    def tokens_per_second(self) -> float:
        return self.ranks[0].plan.step_tokens / self.step_seconds

    @property
    def alone_tokens_per_second(self) -> float | None:
        alone = None if self.alone is None else self.alone.plan
        return None if alone is None or not alone.predicted.step_seconds else alone.step_tokens / alone.predicted.step_seconds

    @property
    def speed_up(self) -> float | None:
        alone = self.alone_tokens_per_second
        return None if alone is None else self.tokens_per_second / alone

    @property
    def work_lost(self) -> float | None:
        """Returns the seconds of work that a crash loses at most: all steps since the last commit. None: all of the run."""
        every = self.ranks[0].plan.commit_every
        return None if every is None else (every + 1) * self.step_seconds

    @property
    def waits(self) -> tuple[float, ...]:
        """Returns the seconds of a step in which each rank waits for others, or for the link to them."""
        return tuple(
            sum(seconds for cause, seconds in rank.stalls.items() if of_other_ranks(cause)) for rank in self.timeline.ranks
        )

    @property
    def idle(self) -> float:
        """Returns the share of a step in which ranks wait for one another, the mean of all."""
        return sum(self.waits) / len(self.waits) / self.step_seconds

    @property
    def slowest(self) -> int:
        """Returns the rank that the others wait for most."""
        return min(range(len(self.ranks)), key=lambda rank: self.waits[rank])

    @property
    def problems(self) -> list[str]:
        numbered = (
            (rank, problem)
            for rank, (one, room) in enumerate(zip(self.ranks, self.rooms, strict=True))
            for problem in plan_problems(one.plan, room)
        )
        return [f"rank {rank}: {problem}" for rank, problem in numbered]

    def written_on_a_box(self) -> int:
        """Returns the bytes that the ranks of the fullest box write to its drives in a step."""
        written = [one.plan.predicted.written_per_step for one in self.ranks]
        each = self.network.ranks_per_box
        return max(sum(written[first : first + each]) for first in range(0, len(written), each))

    def remarks(self) -> list[str]:
        """Says what keeps the ranks from being faster."""
        network, plans = self.network, [one.plan for one in self.ranks]
        reasons, has_waits = list[str](), self.idle > _MUCH
        parts, separate = plans[0].group.micro_batches, plans[0].device != "cpu"
        if has_waits and parts <= network.ranks * (1 + separate):
            reasons.append(
                f"{parts} micro-batches are few for {network.ranks} ranks, which wait for one another: smaller ones or more "
                "rows a step (train.micro_batch_size, train.batch_size) keep more of them at work"
            )
        step, faster = self.timeline.step_seconds, self._over_a_fast_link() if has_waits and network.boxes > 1 else inf
        if faster < (1 - _MUCH) * step:
            reasons.append(
                f"the link binds: over one {_FAST} times as fast a step takes {brief(faster)} instead of {brief(step)}"
            )
        gains_little = self.speed_up is not None and self.speed_up < GAIN
        if gains_little and network.boxes > 1:
            reasons.append(f"{network.ranks} ranks are {_no_faster(self.speed_up)} than one box alone")
        if gains_little and network.boxes == 1 and any(map(waits_for_drives, plans)):
            reasons.append(
                f"{network.ranks} ranks on this box are {_no_faster(self.speed_up)} than one: they share its drives and "
                "memory, which bind. More tokens a step (train.batch_size) or a second box (--boxes 2) help"
            )
        return reasons

    def _over_a_fast_link(self) -> float:
        return simulated(self.ranks, replace(self.network, link=_FAST * self.network.link)).step_seconds


def _no_faster(speed_up: float | None) -> str:
    return "slower" if speed_up is not None and speed_up < 1 else "hardly faster"


def plan_ring(
    loaded: LoadedRecipe, box: Box | None, network: Network, *, measure: bool = False, count: bool = False, say: Say,
    progress: Progress = unheard, beside: bool = True,
) -> Ring:  # fmt: skip
    """Plans ranks of boxes like a described one, or like this machine. `beside`: plans one rank alone as well."""
    machine = None if box is None else box.machine
    inspected, hardware, disks, epoch = inspected_for_plan(
        loaded, machine, measure=measure, count=count, say=say, progress=progress
    )
    recipe = inspected.recipe
    try:
        refuse_keys(recipe, network.ranks)
        if are_replicas(recipe, network.ranks):
            lanes = f"train.lanes: {recipe.train.lanes}"
            say(f"note: this plan is of a ring. With {lanes} a run has replicas, whose plan finetune shows")
    except UsageError as error:
        say(f"note: {error.message}. {REFUSED}")
    part = hardware.shared(network.ranks_per_box) if box is None else box.of_rank(network.ranks_per_box)
    ranks = plan_ranks(inspected, part, _shared(disks, network.ranks_per_box), network, epoch=epoch, say=say)
    alone: Planned | None = None
    with suppress(PlanError):
        alone = None if not beside else plan(inspected, hardware, disks, epoch=epoch, say=lambda text: None)
    if alone is not None and plan_problems(alone.plan, room_of(alone, described=box is not None)):
        alone = None
    rooms = tuple(room_of(one, described=box is not None) for one in ranks)
    return Ring(network=network, ranks=ranks, rooms=rooms, timeline=simulated(ranks, network), alone=alone)


def _shared(disks: StoreDisks, ranks: int) -> StoreDisks:
    """Returns the room for one rank of several on a box: each has files of its own on the same disks."""
    shares = tuple(replace(share, files=ranks * share.files) for share in disks.shares)
    return replace(disks, shares=shares, ranks=ranks)


# ---- two boxes like a plan's own ---------------------------------------------------------------------------------------


def two_boxes(prepared: Planned, room: Room, command: Callable[[Network], str]) -> TwoBoxes | None:
    """Plans two such boxes, if drives or RAM bind this one. `command`: plans them. None if they cannot share this model."""
    if prepared.manifest is not None or prepared.refusal is not None or prepared.hardware.measured == "assumed":
        return None
    if not waits_for_drives(prepared.plan) or not prepared.plan.predicted.step_seconds:
        return None
    try:
        ranks = halves(prepared, TWO_BOXES)
    except FuyouError:
        return None
    ring = Ring(
        network=TWO_BOXES, ranks=ranks, rooms=(room, room), timeline=simulated(ranks, TWO_BOXES), alone=prepared
    )  # fmt: skip
    if ring.problems or ring.speed_up is None:
        return None
    return TwoBoxes(
        network=TWO_BOXES, tokens_per_second=ring.tokens_per_second, speed_up=ring.speed_up, written=ring.written_on_a_box(),
        remarks=tuple(ring.remarks()), command=command(TWO_BOXES),
    )  # fmt: skip
