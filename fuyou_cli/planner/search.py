"""Finds a fast plan that is worth the bytes it writes: a descent over the planner's knobs (`Candidate`), by simulation.

Placing a candidate is cheap. It gives a lower bound and an estimate of the step. Simulating it takes longer, and decides. The
search begins with a few candidates that differ much, and goes on from the best: it places every other value of a knob, knob
after knob, and simulates the likeliest. Knobs that hardly help alone are turned together: outputs with sweeps, what rests on
the device, and at last pipelines with orders of filling RAM. Where candidates are few, all are placed; of a small model all of
them are simulated that may be better. It ends when nothing helps, or after a fixed amount of work that does not depend on the
model's size. It reads no clock: the same inputs give the same plan.

Where a first backward may measure the norm for clipping, a second descent begins with the best plan that does so. That computes
more, but no gradients rest, and updates run beside the second backward as if nothing were clipped.

`offload.wear: spare` compares a step's seconds and its bytes: a plan that writes twice as much as another has to be faster by
WORTH, and one that writes many times as much by twice that. `ignore` compares seconds alone. Steps are compared at the rates
that the run is planned for (`RunPlanner`), with the estimated cost of commits where the planner chooses their interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import Any, Literal

from ..core.errors import PlanError
from ..core.process import uncollected
from ..spec.hardware import HardwareProfile
from ..spec.model import ModelSpec
from ..spec.plan import Plan
from .boundary_layout import every_operator
from .commit_interval import timed_plan
from .costs import Costs
from .fill import SHARES, TURN, may_fill
from .memory import bytes_left
from .place import NONE_KEPT, Candidate, PlacedPlan, Placing, asked_with, least_memory, made_of, sweep_counts, too_small
from .place import plan as first_that_fits
from .plan_request import WORTH_WRITING, PlanRequest, ways_to_rest
from .simulate import STEPS, Timeline, simulate

WORTH = 0.05  # share of the step that writing twice as much has to save
LEAST_WRITTEN = 0.01  # of all weights and states: fewer bytes need no sparing
GAIN = 1e-3  # share of the step that another candidate has to gain
MOST_PLACED = 8_500  # limit on stages of all candidates placed: some two seconds on an old core, with the simulations
MOST_VISITS = 12_000  # limit on visits simulated, over all steps
BRIEF = 0.18  # share of both limits, of a search that begins with a candidate that was good elsewhere; twice with two descents
_FIRST_DESCENT = 0.8  # share of both limits, where a second one measures the norm first
_LEAST = 4  # simulations that are always allowed, however large the model
_TRIES = 3  # candidates simulated of those that are placed together; of the first ones one more
_FAR = 1.04  # times the best; candidates that are expected to be further off are not simulated
_SMALL = 30  # stages of a model in which a slot is much of the memory
_LARGE = 60  # stages from which fewer knobs are turned together: a stage is little of the memory
_FEW = 5_000  # stages of all candidates up to which all of them are placed
_AGAIN = 4  # placing a new plan costs this many times as much as placing a candidate that leads to a known plan
_LITTLE = 0.02  # of the step: what kept outputs save at least where a processor computes with frozen weights


def step_cost(model: ModelSpec, request: PlanRequest, plan: Plan) -> float:
    """Returns what a step of this plan costs, beside plans of other requests for the same model: its seconds, of which a tenth
    of a percent is worth a percent of the bytes that it writes."""
    return _cost(request, _least_written(model), plan.predicted.step_seconds, plan.predicted.written_per_step)


def _cost(request: PlanRequest, floor: int, seconds: float, written: int) -> float:
    return seconds if request.wear == "ignore" else seconds * max(written, floor) ** (2 * WORTH)


def _least_written(model: ModelSpec) -> int:
    return max(1, int(LEAST_WRITTEN * sum(stage.weight_bytes + stage.state_bytes for stage in model.stages)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Alternative:
    """Describes a candidate that was simulated. Seconds are per step."""

    candidate: Candidate
    plan: Plan
    commits: float  # seconds of a step that commits take, if they are more than a step apart
    timeline: Timeline  # without such commits

    @property
    def seconds(self) -> float:
        return self.timeline.step_seconds + self.commits

    @property
    def written(self) -> int:
        return self.plan.predicted.written_per_step


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """Holds what a search found."""

    best: Alternative
    fastest: Alternative  # whatever it writes
    others: tuple[Alternative, ...]
    placed: int  # stages of all candidates placed
    visits: int  # visits simulated
    costs: Costs = field(repr=False, compare=False)  # with what simulations found out: another one of these candidates is quick


def search_timed(
    model: ModelSpec, hardware: HardwareProfile, request: PlanRequest, *, near: Candidate | None = None
) -> tuple[SearchResult, Plan]:  # fmt: skip
    """Searches, and returns the best candidate's plan as well (`timed`). `near`: as `search` has it. Raises PlanError if
    nothing fits."""
    result = search(model, hardware, request, near=near)
    return result, timed(result.best, model, hardware, request, costs=result.costs)


def fastest(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> Plan:
    """Returns the best candidate's plan, with what its step takes. Raises PlanError if nothing fits."""
    return search_timed(model, hardware, request)[1]


def timed(
    alternative: Alternative, model: ModelSpec, hardware: HardwareProfile, request: PlanRequest, *, costs: Costs | None = None
) -> Plan:
    """Returns its plan with simulated times, and with the commit interval that follows from them. `costs`: of the search."""
    chosen = request.commit_every == "auto"
    return timed_plan(model, hardware, alternative.plan, chosen=chosen, step=alternative.timeline, costs=costs)


def search(
    model: ModelSpec, hardware: HardwareProfile, request: PlanRequest, *, candidates: Family | None = None,
    near: Candidate | None = None,
) -> SearchResult:  # fmt: skip
    """Finds the best candidate and those that lost. Raises PlanError if nothing fits. `candidates`: a part of the family, to
    look at nothing else. `near`: the best one of a plan like this; the search is brief, as it begins there too."""
    knobs = candidates or family(model, request)
    knobs = _cautious(knobs, hardware)
    # Plans without room on disk or device come second; the caller, who knows what is there already, refuses them with a clear
    # error.
    for with_room in (True, False):
        with uncollected():
            if (result := _Search(model, hardware, request, knobs, with_room, near).run()) is not None:
                return result
    raise too_small(model, hardware, request)


def _cautious(knobs: Family, hardware: HardwareProfile) -> Family:
    """Rates that are guesses may be far off, so they cannot justify writing more to a drive."""
    return replace(knobs, activations=(0.0,), swap=knobs.swap[:1], fewer=()) if hardware.measured == "assumed" else knobs


class _Search:
    """Holds what a search has seen so far. Each candidate is placed once, and each plan is simulated once."""

    def __init__(
        self, model: ModelSpec, hardware: HardwareProfile, request: PlanRequest, knobs: Family, with_room: bool,
        near: Candidate | None,
    ) -> None:  # fmt: skip
        self.model, self.hardware, self.request, self.knobs = model, hardware, request, knobs
        self.with_room = with_room  # accept only plans that disk and device have room for
        self.near = near
        self.sweeps = sweep_counts(model, request)
        self.free_pages = (True, False) if request.device == "cpu" and not request.free_pages else (False,)
        self.current: Alternative | None = None  # where the descent is
        self.placed = self.visits = 0
        self._is_bounded = True  # not while nothing was found that fits
        self.measures = request.norm_first is None and may_measure_first(model, request)
        share = 1.0 if near is None else BRIEF * (1 + self.measures)
        self._limits = int(share * MOST_PLACED), int(share * MOST_VISITS)
        self._most_placed, self._most_visits = self._limits
        self._placings: dict[tuple[int, bool, bool], Placing] = {}  # by sweeps, `norm_first` and `free_pages`
        self._candidates: dict[Candidate, PlacedPlan | None] = {}
        self._plans: set[PlacedPlan] = set()
        self._simulated: dict[PlacedPlan, Alternative] = {}
        self._longer: dict[tuple[int, int], list[float]] = {}  # pipeline -> ratios of simulated steps to estimates
        self._floor = _least_written(model)

    def run(self) -> SearchResult | None:
        """Returns None if nothing fits."""
        if self.measures:
            self._most_placed, self._most_visits = (int(_FIRST_DESCENT * limit) for limit in self._limits)
        if (best := self._descend_from(self._starts())) is None:
            return None
        if self.measures:
            self._most_placed, self._most_visits = self._limits
            best = self._measuring_first(best)
        fastest = min((best, *self._simulated.values()), key=lambda alternative: alternative.seconds)
        if self._is_better(fastest, best):  # each move was worth it, but not all of them together
            best = fastest
        if any(stage.kept for stage in best.plan.stages):
            best = self._without_little(best)
        fastest = best if self.request.wear == "ignore" else fastest
        return SearchResult(
            best=best, fastest=fastest, others=tuple(other for other in self._simulated.values() if other is not best),
            placed=self.placed, visits=self.visits, costs=self._placing(best.candidate).costs,
        )  # fmt: skip

    def _starts(self) -> Iterator[list[Candidate]]:
        """Yields candidates that differ much, then those that take less and less memory: in one sweep, else in the fewest."""
        for count in self.sweeps:
            if self._place(replace(self.knobs.bare(self.knobs.pipelines[0]), sweeps=count)) is None:
                continue  # nothing takes less
            corners = product(self.knobs.corners(), self.free_pages)
            yield [replace(corner, sweeps=count, free_pages=free) for corner, free in (*self._near(False), *corners)]
            for pipeline in reversed(self.knobs.pipelines):
                yield [replace(self.knobs.bare(pipeline), sweeps=count)]

    def _near(self, norm_first: bool) -> Iterator[tuple[Candidate, bool]]:
        """Yields the candidate that this search begins with, if there is one, and whether free pages have room."""
        near = self.near
        if near is not None and (near.lookahead, near.gradient_slots) in self.knobs.pipelines and near.norm_first >= norm_first:
            yield from product([replace(near, norm_first=norm_first, sweeps=1)], self.free_pages)

    def _descend_from(self, starts: Iterable[list[Candidate]], rival: Alternative | None = None) -> Alternative | None:
        """Returns the best that a descent comes to from the first starts that fit, if any does. `rival`: a start that is far
        worse is not taken."""
        self.current, self._is_bounded = None, rival is not None
        for start in starts:
            self._try(start, tries=_TRIES + 1, rival=rival)
            if self.current is not None:
                break
        self._is_bounded = True
        while self.current is not None:
            before = self.current
            for moves in (self._one_knob, self._two_knobs):
                moves()
            if self.current is before:
                break
        return self.current

    def _measuring_first(self, best: Alternative) -> Alternative:
        """Returns the best plan that measures the norm first, if it is better than this one. RAM is filled anew for it: in a
        large model from this plan's pipeline, and from the one that takes a little less. With one slot for gradients no update
        would run beside the next visit."""
        measuring = _cautious(family(self.model, replace(self.request, norm_first=True)), self.hardware)
        self.knobs = knobs = replace(measuring, pipelines=self.knobs.pipelines)
        self.sweeps = (1,)
        first = replace(
            best.candidate, norm_first=True, sweeps=1, defer=False, activations=knobs.activations[0], swap=knobs.swap[0],
            kept_there=knobs.kept_there[-1], there=knobs.there[-1], copied=1.0,
        )  # fmt: skip
        pipelines = list(knobs.pipelines)
        if len(self.model.stages) > _SMALL:
            own = pipelines.index((first.lookahead, first.gradient_slots))
            pipelines = [pair for pair in pipelines[: max(own, 2)] if pair[1] > 1][-1:]
        starts = [first, *(_with_pipeline(first, pair) for pair in pipelines)]
        orders = product(starts, knobs.states, self.free_pages)
        start = [replace(candidate, states=states, free_pages=free) for candidate, states, free in orders]
        start += [replace(candidate, free_pages=free) for candidate, free in self._near(True)]
        rival = self._descend_from([start], rival=best)
        return rival if rival is not None and self._is_better(rival, best) else best

    def _without_little(self, best: Alternative) -> Alternative:
        """Returns the plan without kept outputs where they save a processor little. What they cost beside copies is in no rate:
        an adapter's thin products are many, and in full RAM the heap gives its pages back after each visit."""
        frozen = self.hardware.device == "cpu" and any(stage.frozen_flops for stage in self.model.stages)
        candidate = replace(best.candidate, activations=NONE_KEPT, swap=0.0)
        placed = self._place(candidate) if frozen and self.request.kept is None else None
        if placed is None or not self._has_room(placed) or placed.plan.predicted.written_per_step > best.written:
            return best
        plain = self._simulate(placed, candidate)
        return plain if plain is not None and plain.seconds <= best.seconds * (1 + _LITTLE) else best

    # ---- moves -----------------------------------------------------------------------------------------------------------

    def _one_knob(self) -> None:
        """Turns one knob after the other, each from where the one before has led. Some turn two that belong together."""
        knobs = self.knobs
        if len(self.model.stages) <= _LARGE:
            self._try(self._with(activations=knobs.activations, swap=knobs.swap))  # before slots take the room for them
        self._try(self._pipelines(len(knobs.pipelines)))
        self._try(self._with(states=knobs.states))
        self._try(self._with(defer=knobs.defer))
        self._try(self._with(activations=knobs.activations))
        self._try(self._with(swap=knobs.swap))
        self._try(self._with(kept_there=knobs.kept_there, there=knobs.there))
        self._try(self._fewer_copies())
        before = None
        while self.current is not before:
            before = self.current
            self._try(self._other_sweeps())
        self._try(self._with(free_pages=self.free_pages))

    def _two_knobs(self) -> None:
        knobs, is_large = self.knobs, len(self.model.stages) > _LARGE
        pipelines = self._pipelines(1 if is_large else 2)
        self._try([replace(candidate, states=states) for candidate in pipelines for states in knobs.states])
        self._try(self._with(sweeps=self._near_sweeps(), states=knobs.states))
        if not is_large:
            self._try(self._with(activations=knobs.activations, swap=knobs.swap))
            self._try(self._with(activations=knobs.activations, states=knobs.states))
            self._try(self._with(activations=knobs.activations, there=knobs.there))
            self._try(self._with(free_pages=self.free_pages, activations=knobs.activations))
            swaps = product(self._pipelines(2), knobs.swap, self.free_pages)
            self._try([replace(candidate, swap=swap, free_pages=free) for candidate, swap, free in swaps])

        if len(every := list(knobs)) * len(self.model.stages) <= _FEW:
            assert self.current is not None
            start = self.current.candidate
            # Of few stages each is much of the memory: no estimate says what waits for a slot then, so all are simulated.
            is_small = len(self.model.stages) <= _SMALL
            counts = self.sweeps if is_small else dict.fromkeys((start.sweeps, *self._near_sweeps()))
            choices = product(every, counts, self.free_pages)
            ways = [
                replace(candidate, sweeps=count, free_pages=free, norm_first=start.norm_first)
                for candidate, count, free in choices
            ]
            self._try(ways, tries=len(ways) if is_small else _TRIES * 4, far=inf if is_small else _FAR)

    def _with(self, **knobs: Iterable[Any]) -> list[Candidate]:
        """Returns the candidate here with every combination of these values."""
        assert self.current is not None
        start = self.current.candidate
        return [replace(start, **dict(zip(knobs, values, strict=True))) for values in product(*knobs.values())]

    def _pipelines(self, near: int) -> list[Candidate]:
        """Returns the candidate here with the pipelines that are at most so many places off."""
        assert self.current is not None
        start, every = self.current.candidate, self.knobs.pipelines
        place = every.index((start.lookahead, start.gradient_slots))
        return [_with_pipeline(start, pair) for pair in every[max(0, place - near) : place + near + 1]]

    def _fewer_copies(self) -> list[Candidate]:
        """Copies may take longer than compute. Then the outputs that save least per byte are better computed again."""
        assert self.current is not None
        if not any(stage.kept for stage in self.current.plan.stages):
            return []
        shares = dict.fromkeys((max(0.0, self.current.candidate.activations), self.knobs.activations[-1]))
        return self._with(swap=(0.0,), activations=shares, copied=self.knobs.fewer)

    def _other_sweeps(self) -> list[Candidate]:
        """With more sweeps over the model each has fewer rows. So less rests from forward to backward, RAM has room for other
        things, weights before states, and the device may have room for the batch. But weights and gradients move once more per
        sweep, and updates run only beside the first forward and the last backward."""
        assert self.current is not None
        kept = [share for share in (NONE_KEPT, 0.0, 0.5, 1.0) if share in self.knobs.activations]
        states = dict.fromkeys((self.current.candidate.states, self.knobs.states[0]))
        return self._with(sweeps=self._near_sweeps(), states=states, activations=kept, kept_there=self.knobs.kept_there)

    def _near_sweeps(self) -> list[int]:
        assert self.current is not None
        place = self.sweeps.index(self.current.candidate.sweeps)
        return [self.sweeps[other] for other in (place - 1, place + 1, place + 2) if 0 <= other < len(self.sweeps)]

    def _try(
        self, candidates: Iterable[Candidate], *, tries: int = _TRIES, far: float = _FAR, rival: Alternative | None = None
    ) -> None:
        """Places these candidates, simulates the likeliest, and goes on from the best of them if it is better."""
        candidate_of: dict[PlacedPlan, Candidate] = {}
        for candidate in candidates:
            placed = self._place(candidate)
            if placed is not None and placed not in self._simulated and placed not in candidate_of and self._has_room(placed):
                candidate_of[placed] = candidate
        seconds = {placed: self._expected(placed, candidate) for placed, candidate in candidate_of.items()}
        cost = {placed: self._cost(seconds[placed], placed.plan.predicted.written_per_step) for placed in candidate_of}
        for placed in sorted(candidate_of, key=lambda placed: (cost[placed], candidate_of[placed]))[:tries]:
            current = self.current or rival
            if current is not None:
                written = placed.plan.predicted.written_per_step
                at_least, best = self._costs((placed.bound, written), (current.seconds, current.written))
                likely = at_least / placed.bound * seconds[placed] if placed.bound else 0.0
                if likely > far * best or at_least > best:
                    continue
            tried = self._simulate(placed, candidate_of[placed])
            if tried is not None and (self.current is None or self._is_better(tried, self.current)):
                self.current = tried

    # ---- comparing -------------------------------------------------------------------------------------------------------

    def _is_better(self, first: Alternative, second: Alternative) -> bool:
        """Whether a plan is better than another by so much that it counts."""
        costs = self._costs((first.seconds, first.written), (second.seconds, second.written))
        return costs[0] < costs[1] * (1 - GAIN)

    def _costs(self, one: tuple[float, int], other: tuple[float, int]) -> tuple[float, float]:
        """Returns what two steps cost beside each other, by their seconds and the bytes that they write."""
        if self.request.wear == "ignore":
            return one[0], other[0]
        least = max(self._floor, min(one[1], other[1]))
        first, second = (seconds * (1 + 2 * WORTH * (1 - least / max(least, written))) for seconds, written in (one, other))
        return first, second

    def _cost(self, seconds: float, written: int) -> float:
        """Returns about what `_is_better` compares, for one plan alone, to put many in order."""
        return _cost(self.request, self._floor, seconds, written)

    def _expected(self, placed: PlacedPlan, candidate: Candidate) -> float:
        """Estimates ignore waits for slots, so steps are longer: as they were with this pipeline, or the nearest one known."""
        pairs = self.knobs.pipelines
        place = pairs.index((candidate.lookahead, candidate.gradient_slots))
        known = [self._longer[pair] for pair in (*pairs[place:], *reversed(pairs[:place])) if pair in self._longer]
        longer = sum(known[0]) / len(known[0]) if known else 1.0
        return max(placed.bound, placed.estimate * longer)

    # ---- work ------------------------------------------------------------------------------------------------------------

    def _placing(self, candidate: Candidate) -> Placing:
        order = (candidate.sweeps, candidate.norm_first, candidate.free_pages)
        if order not in self._placings:
            self._placings[order] = Placing(self.model, self.hardware, asked_with(self.request, candidate))
        return self._placings[order]

    def _place(self, candidate: Candidate) -> PlacedPlan | None:
        """Returns the plan of this candidate, or None if it does not fit or there was too much work already."""
        if candidate in self._candidates:
            return self._candidates[candidate]
        stages = len(self.model.stages)
        if self._is_bounded and self.placed + stages > self._most_placed:
            return None
        placed = self._candidates[candidate] = self._placing(candidate).plan_of(candidate)
        is_new = placed is not None and placed not in self._plans
        self.placed += stages if is_new else -(-stages // _AGAIN)
        if placed is not None:
            self._plans.add(placed)
        return placed

    def _has_room(self, placed: PlacedPlan) -> bool:
        return not self.with_room or self.request.has_room_for(placed.plan, self.hardware)

    def _simulate(self, placed: PlacedPlan, candidate: Candidate) -> Alternative | None:
        """Returns None if there was too much work already."""
        if placed in self._simulated:
            return self._simulated[placed]
        visits = STEPS * len(placed.schedule.visits)
        allowed = _LEAST if visits <= MOST_VISITS else 1  # of a step of many sweeps one may take seconds
        if self.visits + visits > self._most_visits and len(self._simulated) >= allowed:
            return None
        self.visits += visits
        costs = self._placing(candidate).costs
        timeline = simulate(self.model, self.hardware, placed.plan, placed.schedule, costs=costs, jobs=False)
        alternative = Alternative(candidate=candidate, plan=placed.plan, commits=placed.commits, timeline=timeline)
        self._simulated[placed] = alternative
        if placed.estimate:
            pipeline = (candidate.lookahead, candidate.gradient_slots)
            self._longer.setdefault(pipeline, []).append(alternative.seconds / placed.estimate)
        return alternative


def _with_pipeline(candidate: Candidate, pipeline: tuple[int, int]) -> Candidate:
    return replace(candidate, lookahead=pipeline[0], gradient_slots=pipeline[1])


# ---- the candidates --------------------------------------------------------------------------------------------------

_PIPELINES = ((1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4), (3, 6), (4, 8))  # (lookahead, gradient slots), least memory first
_USUAL = (2, 2)
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_FEWER = (0.8, 0.5, 0.9, 0.65, 0.3, 0.85, 0.95, 0.75, 0.7, 0.6, 0.4)  # values of `Candidate.copied`; of a large model the first


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Describes all combinations of these values. Each knob's values are sorted by size, but for -1, which is no share."""

    pipelines: tuple[tuple[int, int], ...]
    states: tuple[float, ...]
    defer: tuple[bool, ...]
    activations: tuple[float, ...]
    swap: tuple[float, ...]
    kept_there: tuple[float, ...] = (0.0,)
    there: tuple[float, ...] = (0.0,)
    fewer: tuple[float, ...] = ()  # other values of `Candidate.copied`

    def __iter__(self) -> Iterator[Candidate]:
        """Yields every combination but those with fewer copies."""
        shares = product(self.states, self.defer, self.activations, self.swap, self.kept_there, self.there)
        for (ahead, slots), (states, defer, activations, swap, kept_there, there) in product(self.pipelines, shares):
            yield Candidate(
                lookahead=ahead, gradient_slots=slots, states=states, defer=defer, activations=activations, swap=swap,
                kept_there=kept_there, there=there,
            )  # fmt: skip

    def corners(self) -> Iterator[Candidate]:
        """Yields a few candidates that differ much, with a medium lookahead and number of gradient slots."""
        bare = self.bare(_USUAL if _USUAL in self.pipelines else self.pipelines[len(self.pipelines) // 2])
        ends = (dict.fromkeys((values[0], values[-1])) for values in (self.states, self.defer, self.activations, self.swap))
        for states, defer, activations, swap in product(*ends):
            yield replace(
                bare, states=states, defer=bool(defer), activations=activations, swap=swap, kept_there=self.kept_there[-1]
            )
        for there in self.there[1:]:
            yield replace(bare, there=there)

    def bare(self, pipeline: tuple[int, int]) -> Candidate:
        """Returns the candidate that keeps and defers nothing unless the recipe asks for it, and fills RAM in the usual
        order."""
        return next(iter(replace(self, pipelines=(pipeline,))))


def family(model: ModelSpec, request: PlanRequest) -> Family:
    """Returns the family. A knob has one value if the recipe sets it, or if it cannot matter."""
    stages = len(model.stages)
    if request.lookahead is not None:
        in_flight = tuple((min(request.lookahead, stages), slots) for slots in (1, 2, 3, 4, 6, 8))
    else:
        in_flight = tuple(pair for pair in _PIPELINES if pair[0] <= max(1, stages))
    # Deferring an update writes its gradients to the ssd: 2 to 4 bytes more per parameter, only to balance the work.
    may_defer = (request.clip_grad_norm is None or request.norm_first) and request.defer is None and request.gradients != "ssd"
    can_keep = request.kept is None and any(stage.operators for stage in model.stages)
    can_move = can_keep and any(every_operator(model))
    shares = _SHARES if request.boundaries is None else (0.0,)
    return Family(
        pipelines=in_flight,
        states=_SHARES if request.states is None and request.weights is None else (0.0,),
        defer=(False, True) if may_defer else (request.defer or False,),
        activations=(NONE_KEPT, *shares) if can_move and request.boundaries not in ("ssd", "gpu") else (0.0,),
        swap=_SHARES if can_move and request.boundaries not in ("cpu", "gpu") else (0.0,),
        kept_there=(0.0, 1.0) if can_keep and request.kept_there is None and bytes_left(model, request) else (0.0,),
        there=(SHARES[0], TURN, *SHARES[1:]) if may_fill(model, request) else (0.0,),
        fewer=_FEWER if can_move and request.device != "cpu" and request.boundaries not in ("ssd", "gpu") else (),
    )


def may_measure_first(model: ModelSpec, request: PlanRequest) -> bool:
    """Whether a step may have a first backward that only measures the norm, so that the second one's updates need not
    wait. It may not if gradients rest for other reasons too, if parameters are frozen, or if a model's code writes into an
    output, which both backwards may be given."""
    return (
        request.clip_grad_norm is not None
        and not request.is_swept
        and request.gradients is None
        and request.defer is None
        and not any(model.has_two_users(stage.index) for stage in model.stages)
        and not any(operator.overwritten for stage in model.stages for operator in stage.operators)
        and not model.frozen_parameters
    )


# ---- the plan of a whole run -----------------------------------------------------------------------------------------
#
# Which of a drive's two write rates count, and where small trained banks rest. A drive writes fast until its fast region is
# full. A run is planned with the sustained rate from its first step on, unless it will certainly end before the region is full.
# A run of unknown length counts as long. Idle time or a trim may free space again; this is not counted, because nobody has
# measured how much.

# "search": the best plan. "usual": the first that fits, with simulated times. "fit": the same without times, which only tells
# whether one fits.
Effort = Literal["search", "usual", "fit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanMade:
    """Holds a plan, the request that it fulfils (with its rates), and the search that found it, if any."""

    request: PlanRequest
    plan: Plan
    search: SearchResult | None


class RunPlanner:
    """Plans runs of one recipe on one machine. Searches once for equal requests of a rank: the numerics in them stand for the
    model, but for whom its stages are dealt to.

    `candidate`: what is placed instead of a search. `near`: what a brief search begins with. `or_least`: where nothing fits,
    plans what needs least.
    """

    def __init__(
        self,
        hardware: HardwareProfile,
        *,
        candidate: Candidate | None = None,
        near: Candidate | None = None,
        effort: Effort = "search",
        or_least: bool = False,
    ) -> None:
        self._hardware, self._candidate, self._effort, self._or_least = hardware, candidate, effort, or_least
        self._near = near
        self._searches: dict[tuple[tuple[int, ...], PlanRequest], PlanMade] = {}

    def plan(self, model: ModelSpec, request: PlanRequest, *, steps: int, effort: Effort | None = None) -> PlanMade:
        """Returns the plan at the rates that the drives have for most of a run of `steps` (0: unknown, counts as many). These
        are the sustained rates if the best plan at first rates would write past the fast region. `effort`: instead of the
        planner's own way. Raises PlanError."""
        hardware = self._hardware
        if not hardware.slows_down:
            return self._rested(model, request, effort)
        if steps and steps * least_written(model, request) <= hardware.burst_bytes:
            first = self._rested(model, request, effort)
            if not leaves_fast_region(first.plan, hardware, steps):
                return first
        return self._rested(model, replace(request, sustained=True), effort)

    def _rested(self, model: ModelSpec, request: PlanRequest, effort: Effort | None) -> PlanMade:
        """Plans with trained banks in RAM where they may rest there, and with them on the ssd if that saves time, or if nothing
        else fits. Raises PlanError if neither fits."""
        seen = list[tuple[tuple[bool, float], PlanMade]]()
        for way in (ways := ways_to_rest(model, request)):
            try:
                planned = self._made(model, way, effort)
            except PlanError:
                if way is ways[-1] and not seen:
                    raise
                continue
            predicted = planned.plan.predicted
            fits = predicted.cpu_peak <= planned.plan.cpu_budget  # a plan that only says what it needs does not
            seconds = predicted.step_seconds * (1 - WORTH_WRITING if way is ways[0] else 1)
            seen.append(((not fits, seconds if fits else float(predicted.cpu_peak)), planned))
        return min(seen, key=lambda pair: pair[0])[1]

    def _made(self, model: ModelSpec, request: PlanRequest, effort: Effort | None) -> PlanMade:
        candidate = self._candidate if effort is None else None
        effort = effort or self._effort
        if candidate is not None:
            placed = made_of(model, self._hardware, request, candidate)
            if placed is None or not request.has_room_for(placed, self._hardware):
                raise PlanError("the plan chosen before does not fit any more")
            plan = placed
        elif effort == "search":
            return self._searched(model, request)
        else:
            plan = first_that_fits(model, self._hardware, request)
        if effort != "fit":
            plan = timed_plan(model, self._hardware, plan, chosen=request.commit_every == "auto")
        return PlanMade(request=request, plan=plan, search=None)

    def _searched(self, model: ModelSpec, request: PlanRequest) -> PlanMade:
        about = model.owners, request
        if about not in self._searches:
            try:
                result, plan = search_timed(model, self._hardware, request, near=self._near)
            except PlanError:
                if not self._or_least:
                    raise
                result, plan = self._least(model, request)
                plan = replace(plan, cpu_budget=request.cpu_budget)
            self._searches[about] = PlanMade(request=request, plan=plan, search=result)
        return self._searches[about]

    def _least(self, model: ModelSpec, request: PlanRequest) -> tuple[SearchResult, Plan]:
        """Searches with the least budget, which fits in one of the ways to rest."""
        least = replace(request, cpu_budget=least_memory(model, self._hardware, request))
        *first, last = ways_to_rest(model, least)
        for way in first:
            with suppress(PlanError):
                return search_timed(model, self._hardware, way)
        return search_timed(model, self._hardware, last)


# ---- drives that slow down -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class FastRegion:
    """Tells how long a plan's drives stay fast, and what a step takes before and after. Times are in seconds."""

    size: int  # bytes over all drives; 0: not known
    steps: float  # steps until it is full
    first: float  # seconds of one step until then
    later: float

    def seconds(self, steps: int) -> float:
        """Returns the seconds that `steps` steps take if the region is empty at first."""
        fast = min(float(steps), self.steps)
        return fast * self.first + (steps - fast) * self.later


def leaves_fast_region(plan: Plan, hardware: HardwareProfile, steps: int) -> bool:
    return hardware.slows_down and steps * plan.predicted.written_per_step > hardware.burst_bytes


def least_written(model: ModelSpec, request: PlanRequest) -> int:
    """Returns the fewest bytes that a step of any plan within the budget writes: weights and states that do not fit in RAM."""
    changed = sum(stage.trained_weight_bytes + stage.state_bytes for stage in model.stages)
    return max(0, changed - request.cpu_budget)


def fast_region(model: ModelSpec, hardware: HardwareProfile, plan: Plan) -> FastRegion | None:
    """Returns the fast region, or None if no drive is known to slow down or the plan writes nothing."""
    written = plan.predicted.written_per_step
    if not hardware.slows_down or not written:
        return None

    def step(sustained: bool) -> float:
        if plan.predicted.forward_seconds and plan.sustained == sustained:  # the plan was simulated
            return plan.predicted.step_seconds
        other = replace(plan, sustained=sustained)
        return timed_plan(model, hardware, other, chosen=False).predicted.step_seconds

    return FastRegion(size=hardware.burst_bytes, steps=hardware.burst_bytes / written, first=step(False), later=step(True))
