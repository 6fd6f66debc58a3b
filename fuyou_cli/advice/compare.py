"""Why the plan is as it is: the same run with one knob of the planner turned, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from fuyou_cli.core.errors import FuyouError
from fuyou_cli.core.units import brief, gb, gib
from fuyou_cli.planner.choice import NONE_KEPT, NONE_PICKED, Choice, Family, family
from fuyou_cli.planner.place import made_of
from fuyou_cli.planner.search import Found, timed
from fuyou_cli.planner.wishes import Wishes
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan

from .planning import Elsewise, alternative, as_chosen_before

if TYPE_CHECKING:
    from fuyou_cli.training.prepare import Prepared

MOST_ROWS = 10
_LITTLE = 0.0005  # of a step: what is not worth a word


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One choice. `plan` is None where it does not fit."""

    words: str
    choice: Choice
    plan: Plan | None
    slower: float  # than the best, as a share of its step
    why: str = ""  # where the time goes, or what there is too little of


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    best: Row
    others: tuple[Row, ...]  # the nearest first, those that do not fit last
    left_out: int  # of such rows
    same: int  # knob values that give the very same plan
    looked_at: int  # choices that the search placed
    family: int  # choices there are
    complete: bool  # no choice of the family is faster


def comparison(elsewise: Elsewise, found: Found, wishes: Wishes) -> Comparison:
    """The best choice, then each other value of each knob with everything else as it is, simulated. The micro-batch size is one
    of them where the recipe leaves it to the planner."""
    prepared, best = elsewise.prepared, found.best
    knobs = family(prepared.model, wishes)
    rows, same, seen = [], 0, [best.plan]
    for turned in _turned(knobs, best.choice):
        of_one: list[Row] = []
        for words, choice in turned:
            plan = _timed(prepared, wishes, choice)
            if plan is not None and any(_alike(plan, other) for other in seen):
                same += 1
                continue
            seen += [] if plan is None else [plan]
            of_one.append(_row(words, choice, plan, prepared, wishes))
        rows.append(sorted(of_one, key=_order))
    rows.append(sorted(_micro_batches(elsewise, best.choice, wishes), key=_order))
    # the nearest of every knob before the second of any
    taken = [row for together in zip_longest(*rows) for row in together if row is not None]
    return Comparison(
        best=Row(words=in_words(knobs, best.choice), choice=best.choice, plan=prepared.plan, slower=0.0),
        others=tuple(sorted(taken[: MOST_ROWS - 1], key=_order)),
        left_out=len(taken[MOST_ROWS - 1 :]),
        same=same,
        looked_at=len(found.others) + 1,
        family=len(knobs),
        complete=found.complete,
    )


def _timed(prepared: Prepared, wishes: Wishes, choice: Choice) -> Plan | None:
    """None where the choice does not fit."""
    plan = made_of(prepared.model, prepared.hardware, wishes, choice)
    if plan is None:
        return None
    return timed(alternative(choice, plan), prepared.model, prepared.hardware, wishes)


def _row(words: str, choice: Choice, plan: Plan | None, prepared: Prepared, wishes: Wishes) -> Row:
    if plan is None:
        return Row(words=words, choice=choice, plan=None, slower=0.0, why="takes more RAM than there is")
    slower = plan.predicted.step_seconds / prepared.plan.predicted.step_seconds - 1
    why = _too_large(plan, prepared, wishes) or _spends(slower, plan, prepared, wishes)
    why = why or (where_time_goes(plan, prepared.plan) if slower > _LITTLE else "")
    return Row(words=words, choice=choice, plan=plan, slower=slower, why=why)


def _too_large(plan: Plan, prepared: Prepared, wishes: Wishes) -> str:
    """What the search passed it over for, if it did."""
    if wishes.has_room_for(plan, prepared.hardware):
        return ""
    device, disk = wishes.gpu_budget, wishes.disk(prepared.hardware)
    if device is not None and plan.predicted.gpu_peak > device:
        return f"takes {gib(plan.predicted.gpu_peak)} of GPU memory, {gib(device)} are there"
    return f"takes {gb(plan.store_size)} of disk, the store can have {gb(disk)}"


def _spends(slower: float, plan: Plan, prepared: Prepared, wishes: Wishes) -> str:
    """What a faster plan was not worth."""
    more = plan.predicted.written_per_step - prepared.plan.predicted.written_per_step
    return f"writes {gb(more)} more a step (offload.wear)" if slower < -_LITTLE and more > 0 and wishes.wear != "ignore" else ""


def where_time_goes(plan: Plan, best: Plan) -> str:
    """What most of a step's time beyond the best's goes to: every second is compute or a wait with a name."""
    before, now = best.predicted, plan.predicted
    more = {cause: seconds - before.stalls.get(cause, 0.0) for cause, seconds in now.stalls.items()}
    computing = (now.step_seconds - sum(now.stalls.values())) - (before.step_seconds - sum(before.stalls.values()))
    cause = max(sorted(more), key=lambda cause: more[cause], default="")
    waiting = more.get(cause, 0.0)
    if max(waiting, computing) < _LITTLE * before.step_seconds:
        return ""
    return f"computes {brief(computing)} longer" if computing >= waiting else f"waits {brief(waiting)} more for {cause}"


def _micro_batches(elsewise: Elsewise, choice: Choice, wishes: Wishes) -> Iterator[Row]:
    """Sizes near the usual one, which `auto` was chosen from, each with the same choice where it fits."""
    from fuyou_cli.training.micro_batches import GAIN, larger_sizes, smaller_sizes, usual_size

    prepared = elsewise.prepared
    recipe, numerics = prepared.recipe, prepared.plan.numerics
    if recipe.train.micro_batch_size != "auto" or prepared.manifest is not None:  # a saved run has its size
        return
    batch = numerics.batch_size, numerics.max_seq_len
    for size in sorted([*smaller_sizes(*batch)[:1], usual_size(*batch), *larger_sizes(*batch)[:2]]):
        if size == numerics.micro_batch_size:
            continue
        train = recipe.train.model_copy(update={"micro_batch_size": size})
        try:
            changed = recipe.model_copy(update={"train": train})
            plan = elsewise.with_recipe(changed, choose=as_chosen_before(choice)).plan
        except FuyouError:
            plan = None
        row = _row(f"micro-batches of {size} row{'s' * (size != 1)}", choice, plan, prepared, wishes)
        if -GAIN < row.slower < -_LITTLE and not row.why:
            row = replace(row, why="too little to leave the usual size for")
        yield row


def _order(row: Row) -> tuple[bool, float, Choice]:
    return row.plan is None, row.slower, row.choice


def _alike(one: Plan, other: Plan) -> bool:
    """Whether two plans do the same."""
    return (one.stages, one.slot_classes, one.boundary_slots, one.lookahead) == (
        other.stages, other.slot_classes, other.boundary_slots, other.lookahead,
    )  # fmt: skip


# ---- knobs -----------------------------------------------------------------------------------------------------------


def _turned(knobs: Family, best: Choice) -> list[list[tuple[str, Choice]]]:
    """By knob, every choice that differs from the best in it alone, with that knob's words."""
    pipelines = [
        (_pipeline(lookahead, slots), replace(best, lookahead=lookahead, gradient_slots=slots))
        for lookahead, slots in knobs.pipelines
        if (lookahead, slots) != (best.lookahead, best.gradient_slots)
    ]
    ordered = replace(best, picked=NONE_PICKED)  # without which the order of tensors would say nothing
    states = [(_states(share), replace(ordered, states=share)) for share in knobs.states if share != ordered.states]
    if best.picked != NONE_PICKED:
        states.insert(0, (_states(ordered.states), ordered))
    return [
        pipelines,
        states,
        [(_defer(share), replace(best, defer=share)) for share in knobs.defer if share != best.defer],
        [
            (_activations(share), replace(ordered, activations=share))
            for share in knobs.activations
            if share != best.activations
        ],
        [(_swap(share), replace(best, swap=share)) for share in knobs.swap if share != best.swap],
    ]


def placed_in_words(plan: Plan, model: ModelSpec) -> str:
    """Any plan, told by what it does: a log's short word for it, also where no search chose it."""
    params = [stage.params for stage in model.stages]
    slots = max(len(slots.gradient_slots) for slots in plan.slot_classes)
    deferred = sum(params[stage.stage] for stage in plan.stages if stage.deferred) / (sum(params) or 1)
    parts = [_pipeline(plan.lookahead, slots), _defer(deferred)]
    for what in ("weights", "states"):
        there = sum(params[stage.stage] for stage in plan.stages if getattr(stage, what) != "ssd")
        parts.append(f"{there / (sum(params) or 1):.0%} of the {what} in RAM")
    keeping = [stage for stage in plan.stages if stage.boundary_ram or stage.boundary_extent]
    parts.append(f"{sum(stage.boundary == 'cpu' for stage in keeping)} of {len(keeping)} boundaries in RAM")
    kept = sum(len(stage.kept) for stage in plan.stages)
    parts.append(f"{kept} outputs kept" if kept else "no outputs kept")
    return ", ".join(parts)


def in_words(knobs: Family, choice: Choice) -> str:
    """The whole choice; knobs with one value are left out."""
    parts = [_pipeline(choice.lookahead, choice.gradient_slots)]
    if choice.picked != NONE_PICKED:
        parts.append("tensors picked for RAM one by one")
    for values, value, words in (
        (knobs.states if choice.picked == NONE_PICKED else (), choice.states, _states),
        (knobs.defer, choice.defer, _defer),
        (knobs.activations, choice.activations, _activations),
        (knobs.swap, choice.swap, _swap),
    ):
        if len(values) > 1:
            parts.append(words(value))
    return ", ".join(parts)


def _pipeline(lookahead: int, slots: int) -> str:
    return f"{lookahead} ahead, {slots} gradient slot{'s' * (slots != 1)}"


def _states(share: float) -> str:
    return f"{share:.0%} of spare RAM for states first" if share else "spare RAM for weights first"


def _defer(share: float) -> str:
    return f"{share:.1%} of the updates in forward".replace(".0%", "%") if share else "every update in backward"


def _activations(share: float) -> str:
    if share == NONE_KEPT:
        return "no outputs in RAM"
    return f"{share:.0%} of spare RAM for outputs first" if share else "outputs in what RAM is left"


def _swap(share: float) -> str:
    return f"{share:.0%} of the outputs to the ssd" if share else "no outputs to the ssd"
