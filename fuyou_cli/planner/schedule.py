"""Lists one training step as visits in order, and an evaluation. The executor follows the list and the simulator runs it: they
have no other description.

A visit is one pass over one stage. The order is forward through all stages, the head (forward and backward at once), then
backward through all stages. A head cut along the vocabulary has two passes: "logits" folds the loss of every token over the
pieces; "head" differentiates piece by piece in reverse, so that it begins with weights just used. A step of several sweeps does
all this for one group of micro-batches after the other. Gradients rest in between, and the last sweep's backward hands them to
the updates.

Weights come from the ssd unless they rest in RAM or were kept since the visit before. Updates run after a stage's backward, or,
if deferred, before its forward in the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from ..core.units import align_up
from ..spec.model import ModelSpec
from ..spec.plan import Plan, StagePlan
from .boundary_layout import RECORD_ALIGN, spared_flops

Pass = Literal["forward", "logits", "head", "backward"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """One pass over one stage in a steady-state step. `owner` is the stage whose weights compute uses (the embedding
    for a tied head). Byte counts are store traffic."""

    index: int
    phase: Pass
    stage: int
    owner: int | None  # None: the visit needs no weights
    fetch: bool  # weights are read from the store for this visit
    keep: bool  # weights stay in their slot until the owner's next visit
    update: Literal["none", "before", "after"]
    stash: bool  # the input boundary is kept for backward
    take: bool  # the input boundary is needed again
    sum_gradients: bool
    rest: bool  # the sum goes to the gradients' home until the owner's own backward
    resume: bool  # continues the sum that rests there
    flops: float
    sweep: int = 0
    measures: bool = False  # in a backward that only measures the norm: its sums are squared, then dropped
    again: bool = False  # in the backward after that one, which has the same gradients
    is_final: bool = True  # in the step's last sweep: the sum is complete, except for a second user's share


@lru_cache(maxsize=1 << 14)  # the schedules of a search's plans have most of their visits in common
def _visit(*values: Any) -> Visit:
    """Returns the visit with these fields, in order. A call by names takes four times as long to find what is known."""
    return Visit(**dict(zip(Visit.__slots__, values, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Store bytes of one step by kind."""

    read: dict[str, int]
    written: dict[str, int]

    @property
    def read_total(self) -> int:
        return sum(self.read.values())

    @property
    def written_total(self) -> int:
        return sum(self.written.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The visits of a step, and the store bytes that they move."""

    visits: tuple[Visit, ...]
    traffic: Traffic


def expand(
    model: ModelSpec,
    *,
    stages: tuple[StagePlan, ...],
    lookahead: int,
    micro_batches: int,
    commit_every: int | None,
    sweeps: int = 1,
    norm_first: bool = False,
    fill: float = 1.0,
) -> Schedule:
    """Returns the steady-state step: states are no longer all zero, and every stage has gradients. `fill`: share of the planned
    tokens that a step computes."""
    order = [(sweep, *visit) for sweep in range(sweeps) for visit in _order(model, stages, is_final=sweep == sweeps - 1)]
    measuring = range(0)
    if norm_first:
        order, measuring = _with_norm_first(model, order)
    first, last = dict[int | None, int](), dict[int | None, int]()  # visits with an owner's weights
    for index, (_, _, _, owner) in enumerate(order):
        first.setdefault(owner, index)
        last[owner] = index
    kept, before = _kept(model, stages, [owner for _, _, _, owner in order], lookahead), dict(last)
    updates = _updates(model, stages, first, last)
    common: dict[tuple[Pass, int, bool], _Common] = {}  # of the visits of all sweeps
    visits: list[Visit] = []
    for index, (sweep, phase, stage, owner) in enumerate(order):
        is_final, measures = sweep == sweeps - 1, index in measuring
        if (alike := common.get((phase, stage, measures))) is None:
            alike = common[phase, stage, measures] = _common(model, stages[stage], phase, measures, micro_batches // sweeps)
        visits.append(
            _visit(
                index,
                phase,
                stage,
                owner,
                index in kept and not kept[before[owner]],  # fetch
                kept.get(index, False),  # keep
                updates.get(index, "none"),
                alike.stash,
                alike.take,
                alike.sum_gradients,
                alike.rest or (alike.sum_gradients and not is_final),
                alike.resume or (alike.sum_gradients and sweep > 0),
                alike.flops,
                sweep,
                measures,
                0 < measuring.stop <= index,  # again
                is_final,
            )
        )
        before[owner] = index
    return Schedule(visits=tuple(visits), traffic=_traffic(model, stages, visits, commit_every, fill))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Common:
    """Holds what the visits of a stage in one phase have in common in all sweeps, by the names of `Visit`."""

    stash: bool
    take: bool
    sum_gradients: bool
    rest: bool
    resume: bool
    flops: float


def _common(model: ModelSpec, plan: StagePlan, phase: Pass, measures: bool, micro_batches: int) -> _Common:
    stage, owner = model.stages[plan.stage], model.owner(plan.stage)
    given = () if model.compiled and measures else plan.given  # a graph serves one backward
    return _Common(
        stash=phase == "forward" and stage.keeps_input,
        take=phase == "backward" and stage.keeps_input,
        sum_gradients=phase in ("head", "backward") and model.stages[owner].trained > 0,
        rest=phase == "head" and model.has_two_users(owner),
        resume=phase == "backward" and model.has_two_users(plan.stage),
        flops=_flops(model, phase, plan.stage, given) * micro_batches,
    )


def recommitted(model: ModelSpec, plan: Plan, schedule: Schedule, commit_every: int | None) -> Schedule:
    """Returns the same step with another number of steps between commits, which changes its traffic."""
    before = schedule.traffic
    written = before.written | _written_by_updates(model, plan.stages, commit_every)
    return replace(schedule, traffic=Traffic(read=before.read, written=written))


def plan_schedule(model: ModelSpec, plan: Plan) -> Schedule:
    """Returns the steady-state step of a plan."""
    return expand(
        model,
        stages=plan.stages,
        lookahead=plan.lookahead,
        micro_batches=plan.own.micro_batches,
        commit_every=plan.commit_every,
        sweeps=plan.sweeps,
        fill=plan.fill,
        norm_first=plan.norm_first,
    )


def _order(model: ModelSpec, stages: tuple[StagePlan, ...], *, is_final: bool) -> list[tuple[Pass, int, int | None]]:
    """Lists (phase, stage, owner of the weights) for a sweep. Backward ends at the lowest stage that learns something. A stage
    that does not need its weights there has them only if its update follows at once. Other ranks visit their stages."""
    own_stages = [stage for stage in model.stages if not stage.away]
    body = [stage for stage in own_stages if stage.kind != "head"]
    heads = [stage.index for stage in own_stages if stage.kind == "head"]
    order: list[tuple[Pass, int, int | None]] = [("forward", stage.index, stage.index) for stage in body]
    if model.head_is_cut:
        order += [("logits", head, model.owner(head)) for head in heads]
    order += [("head", head, model.owner(head)) for head in reversed(heads)]
    for stage in reversed(body):
        if not stage.goes_back:
            continue
        needs_weights = stage.weights_in_backward or (is_final and not stages[stage.index].deferred)
        order.append(("backward", stage.index, stage.index if needs_weights else None))
    return order


def _with_norm_first(
    model: ModelSpec, order: list[tuple[int, Pass, int, int | None]]
) -> tuple[list[tuple[int, Pass, int, int | None]], range]:
    """Puts a backward that only measures the norm before the sweep's own. Returns where it is as well. No update follows it."""
    back = (index for index, (_, phase, _, _) in enumerate(order) if phase in ("head", "backward"))
    turn = next(back, len(order))  # a rank may have no head, or only stages that learn nothing
    first = [
        (sweep, phase, stage, owner if model.stages[stage].weights_in_backward else None)
        for sweep, phase, stage, owner in order[turn:]
    ]
    return [*order[:turn], *first, *order[turn:]], range(turn, turn + len(first))


def _kept(model: ModelSpec, stages: tuple[StagePlan, ...], owners: Sequence[int | None], lookahead: int) -> dict[int, bool]:
    """Tells by visit, of those that compute with weights from the ssd, whether these stay in their slot until they are used
    next, perhaps in the next step.

    They do if that is within the lookahead, or if few other stages take slots of their class in between: at most `lookahead`,
    and not all. So the last blocks of forward are still there when backward begins, and the last of backward when the next
    forward does. What stays and what computes never take more than `lookahead + 1` slots. Rows of a table are others in every
    step. A class with a slot for every stage rests in RAM anyway, unless the recipe wants it on the ssd: then it is read."""
    by_class: dict[int, list[tuple[int, int]]] = {}
    for index, owner in enumerate(owners):
        if owner is not None and stages[owner].weights == "ssd" and model.stages[owner].params:
            by_class.setdefault(stages[owner].slot_class, []).append((index, owner))
    kept = {}
    for uses in by_class.values():
        latest_first = list(dict.fromkeys(owner for _, owner in reversed(uses)))  # as the step before leaves them
        few, recent = min(lookahead, len(latest_first) - 2), latest_first[: lookahead + 1]
        before = {owner: index for index, owner in uses}
        for index, owner in uses:
            away = (index - before[owner] - 1) % len(owners)  # visits in between, of any class
            others = recent.index(owner) if owner in recent else len(owners)  # stages of this class in between
            kept[before[owner]] = (away < lookahead or others <= few) and not stages[owner].looked_up
            recent = [owner, *(stage for stage in recent if stage != owner)][: lookahead + 1]
            before[owner] = index
    return kept


def _updates(
    model: ModelSpec, stages: tuple[StagePlan, ...], first: dict[int | None, int], last: dict[int | None, int]
) -> dict[int, Literal["before", "after"]]:
    """Tells, by visit, whether AdamW runs before it (if deferred: before an owner's first of the step) or after it (its
    last)."""
    updates: dict[int, Literal["before", "after"]] = {}
    for owner in first:
        if owner is not None and model.stages[owner].trained:
            if stages[owner].deferred:
                updates[first[owner]] = "before"
            else:
                updates[last[owner]] = "after"
    return updates


def _flops(model: ModelSpec, phase: Pass, stage: int, kept: tuple[int, ...]) -> float:
    """Returns the FLOPs of one micro-batch."""
    forward = model.stages[stage].forward_flops
    if model.stages[stage].kind == "embedding":
        return 0.0
    # Backward = recompute of what is needed and was not kept, plus twice forward, without gradients of frozen weights. A
    # head in one visit computes its logits once.
    spared = spared_flops(model.stages[stage], kept) if phase == "backward" else 0.0
    spared += model.stages[stage].frozen_flops if phase in ("head", "backward") else 0.0
    return {"forward": 1, "logits": 1, "head": 3, "backward": 3}[phase] * forward - spared


def written_by_update(model: ModelSpec, plan: StagePlan, commit_every: int | None) -> tuple[int, int]:
    """Returns the bytes of weights and of states that one stage's update writes to the store, averaged over all steps."""
    stage = model.stages[plan.stage]
    weights, states = stage.trained_weight_bytes, stage.state_bytes
    in_ram = commit_every or 0
    return (
        weights if plan.writes_weights else weights // in_ram if in_ram else 0,
        states if plan.states == "ssd" else states // in_ram if in_ram else 0,
    )


def fetched_bytes(model: ModelSpec, plan: StagePlan) -> int:
    """Returns the bytes of weights that are read into a slot."""
    stage = model.stages[plan.stage]
    frozen = plan.looked_up or sum(piece.size for piece in stage.source) or stage.frozen_weight_bytes
    return frozen if plan.trained_ram is not None else stage.trained_weight_bytes + frozen


def weights_left(model: ModelSpec, plan: Plan, visits: Sequence[Visit]) -> int:
    """Returns the bytes of weights that a step finds in their slots as the step before left them. A run's first step reads
    them."""
    first = {visit.owner: visit for visit in reversed(visits) if visit.owner is not None}
    owners = [owner for owner, visit in first.items() if plan.stages[owner].weights == "ssd" and not visit.fetch]
    return sum(fetched_bytes(model, plan.stages[owner]) for owner in owners)


def filled(size: int, fill: float) -> int:
    """Returns the bytes of a boundary of `size` planned bytes in a step that computes this share of the planned tokens."""
    return size if fill == 1.0 else align_up(int(size * fill), RECORD_ALIGN)


def _traffic(
    model: ModelSpec, stages: tuple[StagePlan, ...], visits: Sequence[Visit], commit_every: int | None, fill: float
) -> Traffic:
    read = dict.fromkeys(("weights", "states", "gradients", "boundaries"), 0)
    written, fetched = dict.fromkeys(read, 0), [fetched_bytes(model, plan) for plan in stages]
    for visit in visits:
        if visit.fetch and visit.owner is not None:
            read["weights"] += fetched[visit.owner]
        plan = stages[visit.stage]
        if plan.boundary == "ssd" and plan.boundary_extent is not None:
            written["boundaries"] += filled(plan.boundary_extent.size, fill) * visit.stash
            read["boundaries"] += filled(plan.boundary_extent.size, fill) * visit.take
        gradients = stages[visit.stage if visit.owner is None else visit.owner].gradients_extent
        if gradients is not None:
            written["gradients"] += gradients.size * visit.rest
            read["gradients"] += gradients.size * visit.resume
    for stage, plan in zip(model.stages, stages, strict=True):
        if stage.trained == 0:
            continue
        if plan.states == "ssd":
            read["states"] += stage.state_bytes
        if plan.gradients_extent is not None:
            read["gradients"] += plan.gradients_extent.size * plan.deferred
            written["gradients"] += plan.gradients_extent.size * plan.deferred
    return Traffic(read=read, written=written | _written_by_updates(model, stages, commit_every))


def _written_by_updates(model: ModelSpec, stages: tuple[StagePlan, ...], commit_every: int | None) -> dict[str, int]:
    """Returns the bytes of weights and states that the updates of an average step write."""
    trained = [plan for stage, plan in zip(model.stages, stages, strict=True) if stage.trained]
    each = [written_by_update(model, plan, commit_every) for plan in trained]
    return {"weights": sum([weights for weights, _ in each]), "states": sum([states for _, states in each])}


def visits_traffic(model: ModelSpec, visits: Sequence[Visit], stages: tuple[StagePlan, ...], fill: float) -> tuple[int, int]:
    """Returns the store bytes that these visits read and write. `fill`: as of `expand`."""
    read = written = 0
    fetched = [fetched_bytes(model, plan) for plan in stages]
    for visit in visits:
        if visit.fetch and visit.owner is not None:
            read += fetched[visit.owner]
        plan = stages[visit.stage]
        if plan.boundary_extent is not None:
            written += filled(plan.boundary_extent.size, fill) * visit.stash
            read += filled(plan.boundary_extent.size, fill) * visit.take
        owner = stages[visit.stage if visit.owner is None else visit.owner]
        if visit.sum_gradients and not visit.measures and owner.gradients_extent is not None:
            written += owner.gradients_extent.size * (owner.deferred or visit.rest)
            read += owner.gradients_extent.size * visit.resume
    return read, written


def updates_traffic(model: ModelSpec, updated: Sequence[StagePlan], commit_every: int | None) -> tuple[int, int]:
    """Returns the store bytes that the updates of these stages read and write."""
    read = written = 0
    for plan in updated:
        written += sum(written_by_update(model, plan, commit_every))
        if plan.states == "ssd":
            read += model.stages[plan.stage].state_bytes
        if plan.deferred and plan.gradients_extent is not None:
            read += plan.gradients_extent.size
    return read, written


# ---- an evaluation ---------------------------------------------------------------------------------------------------


def evaluation_schedule(model: ModelSpec, plan: Plan) -> Schedule:
    """Returns one pass over the model, for as many rows as one sweep of a step. Nothing is kept for backward, no gradient is
    summed. An update that waits for the next forward runs before the first visit of its stage here, as it would in a step."""
    own_stages = [stage.index for stage in model.stages if not stage.away]
    visits = tuple(_evaluation_visit(model, plan, index, stage) for index, stage in enumerate(own_stages))
    owners = (visit.owner for visit in visits if visit.fetch and visit.owner is not None)
    read = sum(fetched_bytes(model, plan.stages[owner]) for owner in owners)
    return Schedule(visits=visits, traffic=Traffic(read={"weights": read}, written={}))


def _evaluation_visit(model: ModelSpec, plan: Plan, index: int, stage: int) -> Visit:
    owner, is_head = model.owner(stage), model.stages[stage].kind == "head"
    phase: Pass = "logits" if is_head else "forward"
    streamed = plan.stages[owner].weights == "ssd" and model.stages[owner].params > 0
    looks_up = model.stages[stage].kind == "embedding"
    waits = _stays_for_head(model, plan, owner)
    return Visit(
        index=index, phase=phase, stage=stage, owner=owner,
        fetch=streamed and not (waits and is_head), keep=streamed and waits and not is_head,
        update="before" if plan.stages[owner].deferred and not (is_head and owner != stage) else "none",
        stash=False, take=False, sum_gradients=False, rest=False, resume=False,
        flops=0.0 if looks_up else model.stages[stage].forward_flops * plan.group.micro_batches,
    )  # fmt: skip


def _stays_for_head(model: ModelSpec, plan: Plan, owner: int) -> bool:
    """Whether a tied embedding stays in its slot until the head: where no other stage needs a slot of that class."""
    if not model.tied_head or model.head_is_cut or owner != 0:
        return False
    number = plan.stages[owner].slot_class
    others = (stage.stage for stage in plan.stages if stage.slot_class == number and stage.stage != owner)
    return not any(plan.stages[stage].weights == "ssd" and model.stages[stage].params for stage in others)
