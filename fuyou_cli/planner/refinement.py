"""Refines the best plan in ways that are too dear for every candidate: stages on the device, fewer copies, more sweeps, the
norm first.

First it tries that plan with the stages at a step's turn on the device (`fill.TURN`). In the family, such plans would
take the place of others that a limited search looks at.

Then, where a device copies outputs to RAM, it copies fewer of them while that is faster: copies may take longer than compute,
and the outputs that save least per byte are better computed again.

Then it looks for a faster plan whose step has several sweeps over the model. With more sweeps each has fewer rows. So less
rests from forward to backward, RAM has room for other things, and the device may have room for the batch. But weights and
gradients move once more per sweep, and updates run only beside the first forward and the last backward. The search doubles the
number of sweeps (or takes the next divisor of the micro-batches) until two numbers in a row do not help. For each number it
places the best candidate, others near it unless that one is far off, and simulates the likeliest. Then, a processor that
computes with frozen weights keeps no outputs for little.

At last it looks for a faster plan whose step has a first backward that only measures the norm for clipping. That computes
more, but no gradients rest, and updates run beside the second backward as if nothing were clipped. RAM is filled anew for it.

All of it has a fixed limit on work. What it may place the search leaves it (`left_for_refining`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ..spec.model import ModelSpec
from .candidate import NONE_KEPT, Candidate, Family, family, may_measure_first, sweep_counts
from .fill import TURN
from .place import Placed, Placing, asked_with
from .plan_request import PlanRequest
from .search_state import GAIN, MOST_PLACED, SMALL_STAGES, Alternative, counted
from .simulate import STEPS, simulate
from .sparing import WORTH, seconds_and_bytes

MOST_REFINED_VISITS = 5_000  # limit on visits that one refinement simulates
# Shares of `MOST_PLACED`. A clipped step defers no updates, so that the search has fewer choices, and refinement finds more.
_OF_CLIPPED, _OF_OTHERS = 0.25, 0.05
MOST_COPIES_PLACED = 600  # stages of candidates that copy fewer outputs, beside what the search leaves
_TRIES = 2  # simulations per number of sweeps
_IN_VAIN = 2  # numbers of sweeps without a better plan, after which no other is tried
_FAR = 1.05  # times the best step; candidates with a larger estimate are not simulated
_FAR_OFF = 1.1  # times the best step, or the bytes that may be written; near such candidates none is expected to win
_ORDERS = 6  # candidates that are left for the norm first: RAM in five orders, one other pipeline
_LITTLE = 0.02  # of the step: what kept outputs save at least where a processor computes with frozen weights
_KEPT = (NONE_KEPT, 0.0, 0.5, 1.0)  # values of `Candidate.activations`


def left_for_refining(model: ModelSpec, request: PlanRequest, candidates: Family) -> int:
    """Returns how many stages of candidates a refinement may place. The search leaves as many of its own."""
    measures, may_sweep = _may_measure(model, request), len(sweep_counts(model, request)) > 1
    if measures or may_sweep:
        return int(MOST_PLACED * (_OF_OTHERS if request.clip_grad_norm is None else _OF_CLIPPED))
    return len(model.stages) * ((len(candidates.there) > 1) + bool(model.frozen_parameters))


def _may_measure(model: ModelSpec, request: PlanRequest) -> bool:
    return request.norm_first is None and may_measure_first(model, request)


@dataclass(slots=True)
class Refinement:
    """Holds what was seen. `best` is the plan of one sweep until another plan is better. If writes count, the other must write
    no more."""

    one: Placing
    candidates: Family
    best: Alternative
    fastest: Alternative  # of one sweep, whatever it writes
    with_room: bool
    seen: list[Alternative] = field(default_factory=list)  # simulated plans
    placed: int = 0  # stages of all candidates placed
    visits: int = 0  # visits simulated
    _most_placed: int = field(default=0, init=False)
    _most_visits: int = field(default=MOST_REFINED_VISITS, init=False)
    _most_written: float = field(default=0.0, init=False)
    _shortest: float = field(default=float("inf"), init=False)  # seconds of the shortest step seen
    _placings: dict[tuple[int, bool], Placing] = field(default_factory=dict, init=False)  # by sweeps and `norm_first`
    _known: set[Placed] = field(default_factory=set, init=False)  # placed so far
    _found: dict[Placed, Candidate] = field(default_factory=dict, init=False)  # allowed and placed for the same question
    _simulated: set[Placed] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        ignored = self.one.request.wear == "ignore"
        self._most_written = float("inf") if ignored else self.best.plan.predicted.written_per_step
        self._shortest = min(self.best.seconds, self.fastest.seconds)
        self._placings[1, False] = self.one

    def refine(self) -> None:
        """Tries the first stages on the device, then numbers of sweeps in order, then other pipelines of the best, then the
        norm first."""
        model, request = self.one.model, self.one.request
        measures = _may_measure(model, request)
        computes_with_frozen = self.one.hardware.device == "cpu" and any(stage.frozen_flops for stage in model.stages)
        most_placed = left_for_refining(model, request, self.candidates)
        for_later = (measures * _ORDERS + computes_with_frozen) * len(model.stages)
        self._most_placed = most_placed - for_later
        if len(self.candidates.there) > 1:
            self._improved([[replace(self.best.candidate, there=TURN)]])
        most_placed += self._copy_fewer()
        self._most_placed = most_placed - for_later
        self._try_sweeps()
        self._most_placed = most_placed
        if computes_with_frozen:
            self._keep_nothing_for_little()
        if measures:
            self._most_visits = max(MOST_REFINED_VISITS, self.visits + MOST_REFINED_VISITS // 2)
            self._try_measuring_first()

    def _copy_fewer(self) -> int:
        """Copies fewer outputs: the likeliest share of them, then those next to it while that is faster. Returns what it placed
        for that."""
        fewer = self.candidates.fewer
        if not fewer or not any(stage.kept for stage in self.best.plan.stages):
            return 0
        placed, visits = self.placed, self.visits
        self._most_placed = placed + MOST_COPIES_PLACED
        candidate = replace(self.best.candidate, swap=0.0, activations=max(0.0, self.best.candidate.activations))
        self._improved([_with(candidate, "copied", fewer)])
        shares, share = sorted(fewer), 1.0
        while self.best.candidate.copied not in (1.0, share):
            share = self.best.candidate.copied
            place = shares.index(share)
            near = [shares[at] for at in (place - 1, place + 1) if 0 <= at < len(shares)]
            self._improved([[replace(candidate, copied=other)] for other in near])
        self._most_visits += self.visits - visits
        return self.placed - placed

    def _try_sweeps(self) -> None:
        """Tries numbers of sweeps, then other pipelines of the best number."""
        in_vain = 0
        for count in sweep_counts(self.one.model, self.one.request)[1:]:
            if in_vain == _IN_VAIN or not self._may_simulate(2 * len(self.one.model.stages) * count):
                break
            in_vain = 0 if self._improved(self._near(replace(self.best.candidate, sweeps=count))) else in_vain + 1
        if self.best.candidate.sweeps > 1:
            self._improved([[_with_pipeline(self.best.candidate, pipeline) for pipeline in self.candidates.pipelines]])

    def _try_measuring_first(self) -> None:
        """Tries to measure the norm first with as much on the device as may be, RAM filled in other orders, and other
        pipelines. If another pipeline is better, it tries the orders again."""
        knobs = family(self.one.model, replace(self.one.request, norm_first=True))
        first = replace(
            self.best.candidate, norm_first=True, sweeps=1, defer=False, activations=knobs.activations[0], swap=knobs.swap[0],
            kept_there=knobs.kept_there[-1], there=knobs.there[-1], copied=1.0,
        )  # fmt: skip
        orders, is_small = _with(first, "states", knobs.states), len(self.one.model.stages) <= SMALL_STAGES
        # In a small model one stage is much of the memory, so one order far off says nothing of the others.
        tried = [[first, *orders]] if is_small else [[first], orders]
        if self._improved(tried) or self._improved([self._other_pipelines(first)]):
            before = self.best
            self._try_pipelines()
            if self.best is not before:
                self._improved([_with(self.best.candidate, "states", knobs.states)])
            elif is_small:  # in another pipeline another order may be the best
                others = self._other_pipelines(self.best.candidate)
                self._improved([[order for other in others for order in _with(other, "states", knobs.states)]])

    def _other_pipelines(self, candidate: Candidate) -> list[Candidate]:
        """Returns this candidate with every other pipeline in a small model, where a slot is much of the memory. In a large one
        it has two slots for gradients, if it had one: with one no update runs beside the next visit."""
        own = (candidate.lookahead, candidate.gradient_slots)
        others = [pipeline for pipeline in self.candidates.pipelines if pipeline != own]
        if len(self.one.model.stages) > SMALL_STAGES:
            others = [pipeline for pipeline in others if pipeline[1] > 1 >= candidate.gradient_slots][:1]
        return [_with_pipeline(candidate, pipeline) for pipeline in others]

    def _keep_nothing_for_little(self) -> None:
        """Takes the plan without kept outputs where they save a processor little. What they cost beside copies is in no rate:
        an adapter's thin products are many, and in full RAM the heap gives its pages back after each visit."""
        if self.one.request.kept is not None or not any(stage.kept for stage in self.best.plan.stages):
            return
        candidate = replace(self.best.candidate, activations=NONE_KEPT, swap=0.0)
        placing = self._placing(candidate)
        placed = self._placed(placing, candidate)
        least = self.best.plan.predicted.written_per_step
        if placed is not None and self._allows(placed) and placed.plan.predicted.written_per_step <= least:
            plain = self._simulate(placing, placed, candidate)
            self.best = plain if plain.seconds <= self.best.seconds * (1 + _LITTLE) else self.best

    def _try_pipelines(self) -> None:
        """Tries larger pipelines of the best, as long as each is better; if none is, smaller ones."""
        every, before = self.candidates.pipelines, self.best
        place = every.index((before.candidate.lookahead, before.candidate.gradient_slots))
        for further in (every[place + 1 :], every[:place][::-1]):
            for pipeline in further:
                if not self._improved([[_with_pipeline(self.best.candidate, pipeline)]]):
                    break
            if self.best is not before:
                break

    def _near(self, candidate: Candidate) -> Iterator[list[Candidate]]:
        """Returns the candidate, then some that keep other outputs, then some that fill memory in other orders."""
        yield [candidate]
        yield _with(candidate, "activations", (share for share in _KEPT if share in self.candidates.activations))
        likeliest = next(iter(self._likely()), None)
        candidate = candidate if likeliest is None else self._found[likeliest]
        yield _with(candidate, "states", self.candidates.states) + _with(candidate, "kept_there", self.candidates.kept_there)

    def _improved(self, candidates: Iterable[list[Candidate]]) -> bool:
        """Places these candidates, one list after the other while there is hope, and simulates the likeliest. Returns whether
        one is the best now."""
        before, self._found = self.best, {}
        for some in candidates:
            every = [(placed, one) for one in some if (placed := self._placed(self._placing(one), one)) is not None]
            self._found |= {placed: one for placed, one in every if self._allows(placed)}
            if self._found and not self._likely():
                return False
            if len(some) == 1 and any(self._is_far_off(placed) for placed, _ in every):
                return False
        likely = [placed for placed in self._likely() if placed not in self._simulated]
        # Of two alike, the second tells little: it is the one that writes least.
        least = sorted(likely[1:], key=lambda placed: placed.plan.predicted.written_per_step)[: _TRIES - 1]
        for placed in [*likely[:1], *least]:
            if placed.bound < self.best.seconds and self._may_simulate(len(placed.schedule.visits)):
                self._compare(self._simulate(self._placing(self._found[placed]), placed, self._found[placed]))
        return self.best is not before

    def _likely(self) -> list[Placed]:
        """Returns what was found that may win, the likeliest first."""
        return sorted(filter(self._may_win, self._found), key=lambda placed: (placed.estimate, self._found[placed]))

    def _may_win(self, placed: Placed) -> bool:
        return placed.bound < self.best.seconds and placed.estimate < _FAR * self.best.seconds

    def _is_far_off(self, placed: Placed) -> bool:
        written = placed.plan.predicted.written_per_step
        return max(placed.bound, placed.estimate) > _FAR_OFF * self.best.seconds or written > _FAR_OFF * self._most_written

    def _placing(self, candidate: Candidate) -> Placing:
        order = (candidate.sweeps, candidate.norm_first)
        if order not in self._placings:
            asked = asked_with(self.one.request, candidate)
            self._placings[order] = Placing(self.one.model, self.one.hardware, asked)
        return self._placings[order]

    def _placed(self, placing: Placing, candidate: Candidate) -> Placed | None:
        """Returns the plan of this candidate, or None if it does not fit or there was too much work already."""
        stages = len(placing.model.stages)
        if self.placed + stages > self._most_placed:
            return None
        placed = placing.placed(candidate)
        self.placed += counted(placed, stages, self._known)
        return placed

    def _allows(self, placed: Placed) -> bool:
        if placed.plan.predicted.written_per_step > self._most_written:
            return False
        return not self.with_room or self.one.request.has_room_for(placed.plan, self.one.hardware)

    def _may_simulate(self, visits: int) -> bool:
        return self.visits + STEPS * visits <= self._most_visits

    def _simulate(self, placing: Placing, placed: Placed, candidate: Candidate) -> Alternative:
        timeline = self.best.timeline if placed.plan is self.best.plan else None
        if timeline is None:
            timeline = simulate(placing.model, placing.hardware, placed.plan, placed.schedule, costs=placing.costs, jobs=False)
        self.visits += STEPS * len(placed.schedule.visits)
        self._simulated.add(placed)
        found = Alternative(
            candidate=candidate,
            plan=placed.plan,
            bound=placed.bound,
            estimate=placed.estimate,
            commits=placed.commits,
            timeline=timeline,
        )
        self.seen.append(found)
        return found

    def _compare(self, tried: Alternative) -> None:
        """Takes this plan if `offload.wear` prefers it to the best. Near the shortest step, a percent of the step is worth a
        percent of the bytes written to drives."""
        before, request, self._shortest = self.best, self.one.request, min(self._shortest, tried.seconds)
        if request.wear == "ignore":
            better = tried.seconds < before.seconds * (1 - GAIN)
        elif max(tried.seconds, before.seconds) <= self._shortest * (1 + WORTH):
            better = seconds_and_bytes(tried) < seconds_and_bytes(before) * (1 - GAIN)
        else:
            better = tried.seconds < before.seconds
        self.best = tried if better else before


def _with_pipeline(candidate: Candidate, pipeline: tuple[int, int]) -> Candidate:
    return replace(candidate, lookahead=pipeline[0], gradient_slots=pipeline[1])


def _with(candidate: Candidate, knob: str, values: Iterable[Any]) -> list[Candidate]:
    """Returns this candidate with each other value of a knob."""
    return [replace(candidate, **{knob: value}) for value in values if value != getattr(candidate, knob)]
