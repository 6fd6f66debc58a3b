"""Explains the plan: plans the same run with one of the planner's knobs changed, and says what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, get_args

from fuyou_cli.core.errors import PlanError
from fuyou_cli.core.units import brief, gb, gib
from fuyou_cli.planner.candidate import NONE_KEPT, Candidate, family, may_measure_first, sweep_counts
from fuyou_cli.planner.place import made_of
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.search import SearchResult, search_timed, timed
from fuyou_cli.spec.model import ModelSpec, StateDtype
from fuyou_cli.spec.plan import Plan

from .planning import alternative

if TYPE_CHECKING:
    from fuyou_cli.training.prepared import Planned

MOST_ROWS = 9
MOST_SWEEPS = 3  # sweep counts that are planned; many sweeps take long to simulate
LITTLE = 0.0005  # share of a step that is too small to mention


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Holds one other candidate. `plan` is None if it does not fit."""

    words: str
    plan: Plan | None
    slower: float  # extra time over the chosen plan, as a share of its step
    why: str  # where the time goes, or what is too small
    numerics: bool = False  # losses differ


def comparison(prepared: Planned, found: SearchResult) -> tuple[Row, ...]:
    """Plans and simulates every other value of each knob; all else stays. Returns the closest first and those that do not fit
    last. Leaves out values that give a plan already seen."""
    request, by_knob, seen = prepared.request, [], [found.best.plan]
    for candidates in _turned(prepared.model, request, found.best.candidate):
        rows = []
        for words, candidate in candidates:
            plan = made_of(prepared.model, prepared.hardware, request, candidate)
            if plan is not None:
                plan = timed(alternative(candidate, plan), prepared.model, prepared.hardware, request)
                if any(_alike(plan, other) for other in seen):
                    continue
                seen.append(plan)
            rows.append(_row(words, plan, prepared))
        by_knob.append(sorted(rows, key=_order))
    # the closest of every knob comes before the second of any
    taken = [row for together in zip_longest(*by_knob) for row in together if row is not None]
    states = [*_other_states(prepared)]
    return tuple(sorted([*taken[: MOST_ROWS - len(states)], *states], key=_order))


def _other_states(prepared: Planned) -> Iterator[Row]:
    """Yields the plans with other dtypes of optimizer states, searched anew. A saved run keeps its own."""
    model, hardware, request = prepared.model, prepared.hardware, prepared.request
    if prepared.manifest is not None or request.states == "gpu" or model.layout.rule != "adamw":
        return
    for dtype in get_args(StateDtype):
        if dtype == model.layout.dtype:
            continue
        other = model.with_layout(replace(model.layout, dtype=dtype))
        try:
            _, plan = search_timed(other, hardware, request)
        except PlanError:
            plan = None
        yield replace(_row(f"optimizer.state_dtype={dtype}", plan, prepared), numerics=True)


def _order(row: Row) -> tuple[bool, float, str]:
    return row.plan is None, row.slower, row.words


def _alike(one: Plan, other: Plan) -> bool:
    """Tells whether two plans do the same work."""
    keys = ("stages", "slot_classes", "boundary_slots", "lookahead", "sweeps", "norm_first")
    return all(getattr(one, key) == getattr(other, key) for key in keys)


def _row(words: str, plan: Plan | None, prepared: Planned) -> Row:
    if plan is None:
        return Row(words=words, plan=None, slower=0.0, why="needs more RAM than there is")
    slower = plan.predicted.step_seconds / prepared.plan.predicted.step_seconds - 1
    return Row(words=words, plan=plan, slower=slower, why=_why(slower, plan, prepared))


def _why(slower: float, plan: Plan, prepared: Planned) -> str:
    """Says why the search rejected the plan, or where its time goes."""
    request = prepared.request
    device, disk = request.gpu_budget, request.disk(prepared.hardware)
    if device is not None and plan.predicted.gpu_peak > device:
        return f"needs {gib(plan.predicted.gpu_peak)} of GPU memory, but {gib(device)} is available"
    if not request.has_room_for(plan, prepared.hardware):
        return f"needs {gb(plan.store_size)} of disk, but {gb(disk)} is available to the store"
    more = plan.predicted.written_per_step - prepared.plan.predicted.written_per_step
    if slower < -LITTLE:
        return f"writes {gb(more)} more per step (offload.wear)" if more > 0 and request.wear != "ignore" else ""
    return where_time_goes(plan, prepared.plan) if slower > LITTLE else ""


def where_time_goes(plan: Plan, best: Plan) -> str:
    """Says where most of a step's extra time over the best plan goes. Every second is compute or a wait with a name."""
    before, now = best.predicted, plan.predicted
    more = {cause: seconds - before.stalls.get(cause, 0.0) for cause, seconds in now.stalls.items()}
    computing = (now.step_seconds - sum(now.stalls.values())) - (before.step_seconds - sum(before.stalls.values()))
    cause = max(sorted(more), key=lambda cause: more[cause], default="")
    waiting = more.get(cause, 0.0)
    if max(waiting, computing) < LITTLE * before.step_seconds:
        return ""
    return f"computes {brief(computing)} longer" if computing >= waiting else f"waits {brief(waiting)} more for {cause}"


def _turned(model: ModelSpec, request: PlanRequest, best: Candidate) -> Iterator[list[tuple[str, Candidate]]]:
    """Yields, for each knob in turn, every candidate that differs from the best only in it, with its description."""
    knobs = family(model, replace(request, norm_first=best.norm_first or request.norm_first))
    pipelines = [pair for pair in knobs.pipelines if pair != (best.lookahead, best.gradient_slots)]
    if request.norm_first is None and may_measure_first(model, request) and best.sweeps == 1:
        yield [(_norm_first(not best.norm_first), replace(best, norm_first=not best.norm_first, defer=0.0))]
    yield [(_pipeline(*pair), replace(best, lookahead=pair[0], gradient_slots=pair[1])) for pair in pipelines]
    for knob, words in (
        ("states", _states),
        ("defer", _defer),
        ("activations", _kept),
        ("swap", _swap),
        ("kept_there", partial(_kept_there, "graphs" if model.compiled else "outputs")),
        ("there", _there),
    ):
        others = [share for share in getattr(knobs, knob) if share != getattr(best, knob)]
        yield [(words(share), replace(best, **{knob: share})) for share in others]
    counts = [count for count in sweep_counts(model, request) if count != best.sweeps and not best.norm_first]
    yield [(_sweeps(count), replace(best, sweeps=count)) for count in counts[:MOST_SWEEPS]]


def placed_in_words(plan: Plan, model: ModelSpec) -> str:
    """Describes any plan by what it does, in a log's few words."""
    params, trained = [stage.params for stage in model.stages], [stage.trained for stage in model.stages]
    slots = max(len(slots.gradient_slots) for slots in plan.slot_classes)
    deferred = sum(trained[stage.stage] for stage in plan.stages if stage.deferred) / (sum(trained) or 1)
    parts = [_pipeline(plan.lookahead, slots), _defer(deferred)]
    for what in ("weights", "states"):
        in_ram = [stage for stage in plan.stages if getattr(stage, what) != "ssd" and not stage.updated_there]
        share = sum(params[stage.stage] for stage in in_ram) / (sum(params) or 1)
        parts.append(f"{share:.0%} of the {what} in RAM")
    there = sum(params[stage.stage] for stage in plan.stages if stage.updated_there)
    parts += [f"{there / (sum(params) or 1):.0%} of both on the GPU"] if there else []
    keeping = [stage for stage in plan.stages if stage.boundary_ram or stage.boundary_extent or stage.boundary == "gpu"]
    place = "on the GPU" if any(stage.boundary == "gpu" for stage in keeping) else "in RAM"
    parts.append(f"{sum(stage.boundary != 'ssd' for stage in keeping)} of {len(keeping)} boundaries {place}")
    kept_there = sum(len(stage.kept_there) for stage in plan.stages)
    kept = sum(len(stage.given) for stage in plan.stages)
    parts.append(f"{kept} graphs kept" if model.compiled else f"{kept} outputs kept")
    parts += [f"{kept_there} of them on the GPU"] if kept_there and not model.compiled else []
    parts += [_sweeps(plan.sweeps)] if plan.sweeps > 1 else []
    parts += [_norm_first(True)] if plan.norm_first else []
    return ", ".join(parts)


def _pipeline(lookahead: int, slots: int) -> str:
    return f"{lookahead} stage{'s' * (lookahead != 1)} fetched early, {slots} gradient slot{'s' * (slots != 1)}"


def _sweeps(count: int) -> str:
    return f"{count} sweeps over the model" if count > 1 else "one sweep over the model"


def _norm_first(measured: bool) -> str:
    return "a first backward for the norm" if measured else "updates that wait for the norm"


def _states(share: float) -> str:
    return f"{share:.0%} of spare RAM for states first" if share else "spare RAM for weights first"


def _defer(share: float) -> str:
    return f"{share:.1%} of the updates in forward".replace(".0%", "%") if share else "every update in backward"


def _kept(share: float) -> str:
    if share == NONE_KEPT:
        return "no outputs in RAM"
    return f"{share:.0%} of spare RAM for outputs first" if share else "outputs in what RAM is left"


def _swap(share: float) -> str:
    return f"{share:.0%} of the outputs to the ssd" if share else "no outputs to the ssd"


def _kept_there(what: str, share: float) -> str:
    return f"{share:.0%} of the GPU's spare memory for {what} first" if share else f"no {what} on the GPU"


def _there(share: float) -> str:
    return f"{share:.0%} of the GPU's spare memory for whole stages" if share else "no states on the GPU"
