"""Turns a `Candidate` into homes: which stages' tensors rest in RAM.

Everything rests on the ssd first. Outputs of operators get their share of the spare RAM (the paper's Algorithm 1: the most
FLOPs saved per byte first). Then tensors move to RAM in a fixed order, those first that save most bytes of traffic per byte
(`fill`). Outputs get what is left. `plan` returns the first candidate that fits, without a search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import ceil
from typing import Any

from ..core.errors import PlanError
from ..core.units import GiB, MiB, align_up, gib
from ..spec.hardware import HardwareProfile
from ..spec.model import ModelSpec, OperatorSpec
from ..spec.plan import Plan, Predicted, Tier
from .bound import busy_seconds, lower_bound, phase_estimate
from .boundary_layout import Kept, every_operator, of_each
from .commit_interval import guessed_interval, with_commits
from .costs import Costs
from .fill import KINDS, GreedyFill, Item, fitting, outputs_of, stages_filling, traffic_items, with_homes_on_device, worth_most
from .layout import Homes, Layout, SharedSizes, layout, need_rest
from .memory import DeviceMemory, bytes_left, device_memory, host_peaks, memory_lines, stages_on_device, with_batch
from .plan_request import PlanRequest, least_budget_to_rest, rest_in_ram
from .schedule import Schedule, expand, recommitted

# A value of `Candidate.activations`: keep no outputs, because copying some takes longer than computing them again.
NONE_KEPT = -1.0


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Candidate:
    """One set of values for the planner's knobs. Fixed rules (`place`) derive from it which stages' tensors are in RAM."""

    lookahead: int
    gradient_slots: int
    # Share of the spare RAM that goes to optimizer states before weights (weights save more traffic per byte).
    states: float = 0.0
    defer: bool = False  # updates wait for the next forward; ignored with clipping
    # Share of the spare RAM that goes to outputs of operators first; they also get what is left at the end.
    activations: float = 0.0
    swap: float = 0.0  # share of the outputs' bytes that rest with boundaries on the ssd
    sweeps: int = 1  # sweeps per step, unless the request sets them
    norm_first: bool = False  # a first backward measures the norm, unless the request says so
    free_pages: bool = False  # RAM is left for the heap's free pages (`memory.free_pages`)
    kept_there: float = 0.0  # share of the device's spare memory that goes to outputs that stay there, before weights
    there: float = 0.0  # share of the device's spare memory that goes to whole stages (weights, gradients, states), or `TURN`
    copied: float = 1.0  # share of the outputs' bytes that RAM may get, the most FLOPs saved per byte first


def pipelines(request: PlanRequest, *, stages: int) -> list[tuple[int, int]]:
    """Lists (lookahead, gradient slots) for a plan without a search: the usual pair, then those that take less memory."""
    if request.lookahead is not None:
        lookahead = min(request.lookahead, stages)
        return [(lookahead, 2), (lookahead, 1)]
    return [(2, 2), (1, 2), (1, 1)]


def sweep_counts(model: ModelSpec, request: PlanRequest) -> tuple[int, ...]:
    """Returns the numbers of sweeps that the planner may choose. Each divides a step's micro-batches and is at least twice the
    one before."""
    if request.sweeps is not None or request.norm_first or not model.may_sweep:
        return (1,)
    if request.numerics.lanes > 1:  # their sums under way would have to rest between sweeps
        return (1,)
    if request.numerics.router_aux_loss:  # whose slope is known once all rows were forward
        return (1,)
    micro_batches, counts = request.numerics.micro_batches, [1]
    if request.numerics.batch_size % request.numerics.micro_batch_size:
        return (1,)
    for count in range(2, micro_batches + 1):
        if micro_batches % count == 0 and count >= 2 * counts[-1]:
            counts.append(count)
    return tuple(counts)


PLAN_VERSION = 1
_SPANS = tuple(item.name for item in fields(Layout))  # a plan has them under the same names


def plan(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> Plan:
    """Returns the plan of the first candidate that fits, without kept outputs unless the request asks for them. Raises
    PlanError with the memory that would be enough."""
    request = replace(request, kept=request.kept or "none")
    for count, (lookahead, slots) in product(sweep_counts(model, request), pipelines(request, stages=len(model.stages))):
        candidate = Candidate(lookahead=lookahead, gradient_slots=slots, defer=request.defer or False, sweeps=count)
        placed = made_of(model, hardware, request, candidate)
        if placed is not None:
            return placed
    raise too_small(model, hardware, request)


def made_of(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest, candidate: Candidate) -> Plan | None:
    """Returns the plan of this candidate, or None if it does not fit."""
    placed = Placing(model, hardware, asked_with(request, candidate)).plan_of(candidate)
    return placed.plan if placed is not None else None


def asked_with(request: PlanRequest, candidate: Candidate) -> PlanRequest:
    """Returns the request with the order of visits that the candidate has, and its room for free pages."""
    return replace(
        request,
        sweeps=request.sweeps or candidate.sweeps,
        norm_first=candidate.norm_first or request.norm_first,
        free_pages=candidate.free_pages or request.free_pages,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlacedPlan:
    """A plan, and what the closed form says about its step. Times are in seconds."""

    plan: Plan
    schedule: Schedule
    bound: float  # no step is faster
    estimate: float
    commits: float  # the part of both that commits take, if they are more than a step apart


class Placing:
    """Places the candidates of one run. What several candidates share is computed once, and equal homes give the same
    object."""

    def __init__(self, model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> None:
        self.asked, request = request, with_batch(model, request)
        self.model, self.hardware, self.request = model, hardware, request
        self.costs = Costs.of(model, hardware, request)
        self._shared = SharedSizes(model, request)
        self._outputs = outputs_of(model, request)
        self._movable = [output for output in self._outputs if not output.operator.stays]
        self._starts: dict[tuple[object, ...], _FillStart | None] = {}
        self._placed: dict[tuple[object, ...], PlacedPlan] = {}
        self._filled: dict[tuple[_FillStart, float, float, float], PlacedPlan] = {}
        self._chosen: dict[tuple[bool, float], PlanRequest] = {}  # by `defer` and the share of `there`
        # By the shares of `swap` and `kept_there`, and by the stages on the device.
        self._kept: dict[tuple[object, ...], tuple[Kept, Kept]] = {}

    def plan_of(self, candidate: Candidate) -> PlacedPlan | None:
        """Returns the plan of this candidate, or None if it does not fit."""
        asked = self._request_with(candidate)
        pipeline = (candidate.lookahead, candidate.gradient_slots, asked.defers)
        start = self._start_of(asked, candidate, pipeline)
        if start is None:
            return None
        if start.everything is not None and candidate.activations <= 0:
            candidate = replace(candidate, states=0.0)  # if all tensors rest in RAM, the order does not matter
        known = (start, candidate.activations, candidate.states, candidate.copied)
        if known not in self._filled:
            self._filled[known] = self._place_from(asked, candidate, start, pipeline)
        return self._filled[known]

    def _request_with(self, candidate: Candidate) -> PlanRequest:
        """Returns the request with the candidate's deferred updates and its stages that rest on the device."""
        chosen = (candidate.defer, candidate.there)
        if chosen not in self._chosen:
            asked = self.request
            if asked.clip_grad_norm is None or asked.norm_first:
                asked = replace(asked, defer=candidate.defer)
            if candidate.there:
                asked = replace(asked, device_states=stages_filling(self.model, asked, candidate.there))
            self._chosen[chosen] = asked
        return self._chosen[chosen]

    def _place_from(
        self, asked: PlanRequest, candidate: Candidate, start: _FillStart, pipeline: tuple[int, int, bool]
    ) -> PlacedPlan:
        filling = self._fill(asked, candidate, start)
        key = (filling.homes, pipeline)
        if key not in self._placed:
            homes, spans = self._take_back_until_it_fits(filling, candidate)
            same = (homes, candidate.lookahead, spans.slot_classes, pipeline[2])
            self._placed[key] = self._placed[same] = self._placed.get(same) or self._make_plan(asked, spans, candidate)
        return self._placed[key]

    def _make_plan(self, asked: PlanRequest, spans: Layout, candidate: Candidate) -> PlacedPlan:
        at_most_one = asked.commit_every in (None, 1)  # at most one step between two commits
        plain = asked if at_most_one else replace(asked, commit_every=None)
        schedule = expand(
            self.model,
            stages=spans.stages,
            lookahead=candidate.lookahead,
            micro_batches=asked.numerics.micro_batches,
            commit_every=plain.asked_interval,
            sweeps=asked.sweeps or 1,
            norm_first=bool(asked.norm_first),
            fill=self.costs.fill,
        )
        spans = replace(spans, stages=with_homes_on_device(self.costs, asked, schedule, spans.stages))
        plan = _plan_of(self.costs, plain, spans, schedule, lookahead=candidate.lookahead)
        return self._with_bounds(plan, schedule) if at_most_one else self._with_apart_commits(asked, plan, schedule)

    def _with_bounds(self, plan: Plan, schedule: Schedule) -> PlacedPlan:
        bound, estimate = lower_bound(self.costs, schedule, plan), phase_estimate(self.costs, schedule, plan)
        return PlacedPlan(plan=plan, schedule=schedule, bound=bound, estimate=estimate, commits=0.0)

    def _with_apart_commits(self, asked: PlanRequest, plain: Plan, schedule: Schedule) -> PlacedPlan:
        """Returns the same plan with commits added."""
        estimate = phase_estimate(self.costs, schedule, plain)
        guess, commit = guessed_interval(self.costs, plain, step=estimate)
        every = guess if asked.commit_every == "auto" else asked.commit_every
        assert every is not None
        committing = recommitted(self.model, plain, schedule, every)
        plan = with_commits(self.costs, plain, committing, every)
        if every == 1:
            return self._with_bounds(plan, committing)
        bound, each = lower_bound(self.costs, schedule, plain), commit / every
        return PlacedPlan(plan=plan, schedule=schedule, bound=bound + each, estimate=estimate + each, commits=each)

    def _lay_out(self, asked: PlanRequest, homes: Homes, candidate: Candidate) -> tuple[Layout, dict[str, int]]:
        """Returns the spans, and the peaks of RAM by phase."""
        pipeline = {"lookahead": candidate.lookahead, "gradient_slots": candidate.gradient_slots}
        spans = layout(self._shared, asked, homes, **pipeline)
        return spans, host_peaks(self.model, self.hardware, asked, spans)

    def _start_of(self, asked: PlanRequest, candidate: Candidate, pipeline: tuple[object, ...]) -> _FillStart | None:
        """Returns homes with nothing moved to RAM yet, or None if even that does not fit."""
        shares = (candidate.swap, candidate.kept_there, asked.device_states)
        if shares not in self._kept:
            staying = self._outputs_on_device(asked, candidate.kept_there)
            self._kept[shares] = _leave_out(_first_kept(self.model, asked, candidate.swap), staying), staying
        key = (self._kept[shares], pipeline, asked.device_states)
        if key not in self._starts:
            homes = _first_homes(self.model, asked, *self._kept[shares])
            spans, peaks = self._lay_out(asked, homes, candidate)
            fits = max(peaks.values()) <= asked.cpu_budget
            self._starts[key] = self._fill_start(asked, candidate, homes, spans, peaks) if fits else None
        return self._starts[key]

    def _outputs_on_device(self, asked: PlanRequest, share: float) -> Kept:
        """Returns the operators whose outputs stay on the device. If the planner chooses, they fill `share` of the memory that
        stages resting there have left."""
        if isinstance(asked.kept_there, tuple):
            return asked.kept_there
        if asked.kept_there == "room" and asked.gpu_budget is None:
            return every_operator(self.model, there=True)
        room = bytes_left(self.model, asked)
        room = room if asked.kept_there == "room" else int(share * room)
        return fitting(self.model, self._outputs, asked.group, room)

    def _fill_start(
        self, asked: PlanRequest, candidate: Candidate, homes: Homes, spans: Layout, peaks: dict[str, int]
    ) -> _FillStart:
        items = sorted(traffic_items(self._shared, asked, homes, spans), key=lambda item: item.order)
        return _FillStart(
            nothing=GreedyFill.of(self._shared, asked, homes, peaks),
            items=tuple(items),
            everything=self._all_in_ram(asked, candidate, homes, items),
        )

    def _all_in_ram(self, asked: PlanRequest, candidate: Candidate, homes: Homes, items: list[Item]) -> GreedyFill | None:
        """Returns a fill with everything in RAM, or None if that does not fit."""
        moved = {(item.kind, stage) for item in items for stage in item.stages}
        tiers: dict[str, Any] = {
            kind: tuple("cpu" if (kind, stage) in moved else tier for stage, tier in enumerate(getattr(homes, kind)))
            for kind in KINDS
        }
        everything = replace(homes, **tiers)
        together = zip(self.model.stages, everything.weights, everything.states, strict=True)
        if sum(stage.weight_bytes for stage, *tiers in together if tiers == ["cpu", "cpu"]) > asked.cpu_budget:
            return None  # quicker than laying it all out
        _, peaks = self._lay_out(asked, everything, candidate)
        return GreedyFill.of(self._shared, asked, everything, peaks) if max(peaks.values()) <= asked.cpu_budget else None

    def _fill(self, asked: PlanRequest, candidate: Candidate, start: _FillStart) -> GreedyFill:
        movable = self._movable if candidate.copied == 1 else worth_most(self._movable, candidate.copied)
        if start.everything is not None and candidate.activations <= 0:
            # Everything moves at once: tensor by tensor, the slots that only the last move frees would be in its way.
            filling = start.everything.copy()
        else:
            filling = start.nothing.copy()
            if candidate.activations > 0:
                filling.keep(movable, share=candidate.activations)
            if candidate.states:
                filling.settle([item for item in start.items if item.kind == "states"], share=candidate.states)
            filling.settle(start.items)
        if asked.kept is None and candidate.activations != NONE_KEPT:
            filling.keep(movable, share=1.0)
        return filling

    def _take_back_until_it_fits(self, filling: GreedyFill, candidate: Candidate) -> tuple[Homes, Layout]:
        """Undoes the last moves until the layout fits. The estimate used before may be slightly too small."""
        while True:
            spans, peaks = self._lay_out(filling.request, filling.homes, candidate)
            if max(peaks.values()) <= filling.request.cpu_budget or not filling.take_back():
                return filling.homes, spans


def least_memory(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> int:
    """Returns the least budget that fits: bytes of the whole process when everything that may rest on the ssd rests there, in
    as many sweeps as take least."""
    if len(counts := sweep_counts(model, request)) > 1:
        return min(least_memory(model, hardware, replace(request, sweeps=count)) for count in counts)
    if request.trained_in_ram is None and (first := least_budget_to_rest(model, request)) is not None:
        trained_in_ram, trained_elsewhere = (
            least_memory(model, hardware, replace(request, trained_in_ram=rests)) for rests in (True, False)
        )
        return min(trained_elsewhere, max(trained_in_ram, first))
    request = with_batch(model, request)
    nothing: Kept = ((),) * len(model.stages)
    shared, homes = SharedSizes(model, request), _first_homes(model, request, _first_kept(model, request, 0.0), nothing)
    spans = (
        layout(shared, request, homes, lookahead=lookahead, gradient_slots=slots)
        for lookahead, slots in pipelines(request, stages=len(model.stages))
    )
    return min(max(host_peaks(model, hardware, request, some).values()) for some in spans)


def too_small(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> PlanError:
    """Returns the error for a budget that is too small. Callers that can plan changed recipes add suggestions."""
    smallest = least_memory(model, hardware, replace(request, trained_in_ram=None))
    # Rounded up as it is shown: what it names fits.
    smallest = align_up(smallest, MiB) if smallest < GiB - MiB else ceil(100 * smallest / GiB) * GiB // 100
    return PlanError(
        f"does not fit: the run needs at least {gib(smallest)} of RAM, but offload.max_memory.cpu is {gib(request.cpu_budget)}"
    )


def _plan_of(costs: Costs, request: PlanRequest, spans: Layout, schedule: Schedule, *, lookahead: int) -> Plan:
    """Builds the plan of these spans, with the closed form's figures for one step."""
    device = device_memory(costs.model, request, spans.stages)
    return Plan(
        version=PLAN_VERSION,
        model=request.model_name,
        device=request.device,
        numerics=request.numerics,
        clip_grad_norm=request.clip_grad_norm,
        batch_on_device=bool(request.batch_on_device),
        sweeps=request.sweeps or 1,
        free_pages=request.free_pages,
        norm_first=bool(request.norm_first),
        lookahead=lookahead,
        cpu_budget=request.cpu_budget,
        commit_every=request.asked_interval,
        memory=memory_lines(costs.model, costs.hardware, request, spans, device),
        predicted=_predict(costs, request, spans, schedule, device),
        sustained=request.sustained,
        typical=request.typical,
        **{name: getattr(spans, name) for name in _SPANS},
    )


def _predict(costs: Costs, request: PlanRequest, spans: Layout, schedule: Schedule, device: DeviceMemory) -> Predicted:
    model, numerics = costs.model, request.numerics
    seconds = busy_seconds(costs, schedule, stages=spans.stages, device=request.device)
    bottleneck = max(sorted(seconds), key=lambda name: seconds[name])
    return Predicted(
        cpu_peaks=host_peaks(model, costs.hardware, request, spans),
        gpu_peak=device.total,
        ssd_bytes=spans.store_size,
        export_bytes=request.export_item * (model.trained_parameters if request.exports_trained else model.parameters),
        read_per_step=schedule.traffic.read_total,
        written_per_step=schedule.traffic.written_total,
        read_by=schedule.traffic.read,
        written_by=schedule.traffic.written,
        step_flops=model.flops_per_token * (numerics.tokens if request.typical is None else request.typical.tokens),
        compute_flops=costs.fill * sum(visit.flops for visit in schedule.visits),
        seconds=seconds,
        step_seconds=seconds[bottleneck],
        bottleneck=bottleneck,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _FillStart:
    """Where filling RAM begins, and what may move there, in order."""

    nothing: GreedyFill  # homes with nothing in RAM yet
    everything: GreedyFill | None  # homes with everything in RAM; None if that does not fit
    items: tuple[Item, ...]


def _first_homes(model: ModelSpec, request: PlanRequest, kept: Kept, kept_there: Kept) -> Homes:
    """Puts everything on the ssd except what the recipe fixes, with these outputs. A stage without a tensor of some kind says
    cpu for it."""
    count = len(model.stages)
    boundaries: tuple[Tier, ...] = tuple((request.boundaries or "ssd") if s.keeps_input else "cpu" for s in model.stages)
    first: Tier = "cpu" if rest_in_ram(model, request) else "ssd"
    gradients: list[Tier] = [
        _home_off_device(request.gradients, first) if is_resting else "cpu" for is_resting in need_rest(model, request)
    ]
    on_device = stages_on_device(model, request)
    return Homes(
        weights=tuple("gpu" if index in on_device else request.weights or "ssd" for index in range(count)),
        states=tuple("gpu" if index in on_device else _home_off_device(request.states, first) for index in range(count)),
        gradients=tuple("gpu" if index in on_device else gradients[index] for index in range(count)),
        boundaries=boundaries,
        kept=kept,
        kept_there=kept_there,
    )


def _home_off_device(asked: Tier | None, first: Tier) -> Tier:
    """Returns the home of tensors that do not rest on the device. The planner begins with `first`."""
    return first if asked in (None, "gpu") else asked


def _leave_out(kept: Kept, others: Kept) -> Kept:
    pairs = zip(kept, map(frozenset, others), strict=True)
    return tuple(tuple([index for index in some if index not in beside]) for some, beside in pairs)


def _first_kept(model: ModelSpec, request: PlanRequest, swap: float) -> Kept:
    every = every_operator(model)
    if request.kept == "all":
        return every
    if request.kept == "none":
        return ((),) * len(model.stages)
    if request.kept is not None:
        assert all(set(some) <= set(known) for some, known in zip(request.kept, every, strict=True)), (request.kept, every)
        return request.kept
    return of_each(model, lambda operators: _most_saved([operator for operator in operators if not operator.stays], swap))


def _most_saved(operators: Sequence[OperatorSpec], share: float) -> tuple[int, ...]:
    """Returns outputs within `share` of all the bytes, the most FLOPs saved per byte first."""
    if not share:
        return ()
    left = share * sum(operator.bytes for operator in operators)
    chosen: list[int] = []
    for operator in sorted(operators, key=lambda operator: (-operator.flops / max(1, operator.bytes), operator.index)):
        if operator.bytes <= left:
            left -= operator.bytes
            chosen.append(operator.index)
    return tuple(sorted(chosen))
