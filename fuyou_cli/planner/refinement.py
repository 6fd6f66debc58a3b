"""Refines the best plan in ways that are too dear for every candidate: stages on the device, more sweeps, the norm first.

First it tries that plan with the stages at a step's turn on the device (`device_fill.TURN`). In the family, such plans would
take the place of others that a limited search looks at.

Then it looks for a faster plan whose step has several sweeps over the model. With more sweeps each has fewer rows. So less
rests from forward to backward, RAM has room for other things, and the device may have room for the batch. But weights and
gradients move once more per sweep, and updates run only beside the first forward and the last backward. The search doubles the
number of sweeps (or takes the next divisor of the micro-batches) until two numbers in a row do not help. For each number it
places a few candidates near the best, more if one of them may be faster, and simulates the likeliest. All of it has a fixed
limit on work. Then, a processor that computes with frozen weights keeps no outputs for little.

At last it looks for a faster plan whose step has a first backward that only measures the norm for clipping. That computes
more, but no gradients rest, and updates run beside the second backward as if nothing were clipped. RAM is filled anew for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from .candidate import NONE_KEPT, Candidate, Family, family, may_measure_first, sweep_counts
from .device_fill import TURN
from .place import Placed, Placing, asked_with
from .search_state import GAIN, Alternative
from .simulate import STEPS, simulate
from .sparing import WORTH, price, seconds_and_bytes

MOST_REFINED_VISITS = 5_000  # limit on visits that one refinement simulates
_TRIES = 2  # simulations per number of sweeps
_IN_VAIN = 2  # numbers of sweeps without a better plan, after which no other is tried
_FAR = 1.05  # times the best step; candidates with a larger estimate are not simulated
_LITTLE = 0.02  # of the step: what kept outputs save at least where a processor computes with frozen weights
_KEPT = (NONE_KEPT, 0.0, 0.5, 1.0)  # values of `Candidate.activations`


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

    def __post_init__(self) -> None:
        ignored = self.one.request.wear == "ignore"
        self._most_written = float("inf") if ignored else self.best.plan.predicted.written_per_step
        self._shortest = min(self.best.seconds, self.fastest.seconds)

    _limit: int = field(default=MOST_REFINED_VISITS, init=False)
    _most_written: float = field(default=0.0, init=False)
    _shortest: float = field(default=float("inf"), init=False)  # seconds of the shortest step seen

    def refine(self) -> None:
        """Tries the first stages on the device, then numbers of sweeps in order, then other pipelines of the best, then the
        norm first."""
        if len(self.candidates.there) > 1:
            self._improved([replace(self.best.candidate, there=TURN)])
        in_vain = 0
        for count in sweep_counts(self.one.model, self.one.request)[1:]:
            if in_vain == _IN_VAIN or not self._may_simulate(2 * len(self.one.model.stages) * count):
                break
            in_vain = 0 if self._improved(*self._near(replace(self.best.candidate, sweeps=count))) else in_vain + 1
        if self.best.candidate.sweeps > 1:
            pipelines = [
                replace(self.best.candidate, lookahead=lookahead, gradient_slots=slots)
                for lookahead, slots in self.candidates.pipelines
                if (lookahead, slots) != (self.best.candidate.lookahead, self.best.candidate.gradient_slots)
            ]
            self._improved(pipelines)
        if self.one.hardware.device == "cpu" and any(stage.frozen_flops for stage in self.one.model.stages):
            self._keep_nothing_for_little()
        if self.one.request.norm_first is None and may_measure_first(self.one.model, self.one.request):
            self._limit = self.visits + MOST_REFINED_VISITS // 2
            if self._improved(*self._measuring_first()):
                self._try_pipelines()
                self._limit = self.visits + MOST_REFINED_VISITS // 2
                self._improved(*self._measuring_first())  # RAM in other orders, for the pipeline found

    def _keep_nothing_for_little(self) -> None:
        """Takes the plan without kept outputs where they save a processor little. What they cost beside copies is in no rate:
        an adapter's thin products are many, and in full RAM the heap gives its pages back after each visit."""
        if self.one.request.kept is not None or not any(stage.kept for stage in self.best.plan.stages):
            return
        candidate = replace(self.best.candidate, activations=NONE_KEPT, swap=0.0)
        placing = Placing(self.one.model, self.one.hardware, replace(self.one.request, sweeps=candidate.sweeps))
        placed = self._placed(placing, candidate)
        if placed is not None and placed.plan.predicted.written_per_step <= self.best.plan.predicted.written_per_step:
            plain = self._simulated(placing, placed, candidate)
            self.best = plain if plain.seconds <= self.best.seconds * (1 + _LITTLE) else self.best

    def _measuring_first(self) -> tuple[list[Candidate], list[Candidate]]:
        """Returns the best candidate with as much on the device as may be, then the same with RAM filled in other orders."""
        knobs = family(self.one.model, replace(self.one.request, norm_first=True))
        first = replace(
            self.best.candidate, norm_first=True, sweeps=1, defer=0.0, activations=knobs.activations[0], swap=knobs.swap[0],
            kept_there=knobs.kept_there[-1], there=knobs.there[-1],
        )  # fmt: skip
        return [first], [replace(first, states=states) for states in knobs.states]

    def _try_pipelines(self) -> None:
        """Tries larger pipelines of the best, as long as each is better, then smaller ones."""
        every, best = self.candidates.pipelines, self.best.candidate
        place = every.index((best.lookahead, best.gradient_slots))
        for further in (every[place + 1 :], every[:place][::-1]):
            for lookahead, slots in further:
                if not self._improved([replace(self.best.candidate, lookahead=lookahead, gradient_slots=slots)]):
                    break

    def _near(self, candidate: Candidate) -> tuple[list[Candidate], list[Candidate]]:
        """Returns candidates that keep other outputs, and candidates that fill RAM in other orders."""
        kept = [share for share in _KEPT if share in self.candidates.activations]
        other_outputs = [replace(candidate, activations=share) for share in dict.fromkeys((candidate.activations, *kept))]
        other_orders = [
            replace(one, states=states, kept_there=there)
            for one, states, there in product(other_outputs, self.candidates.states, self.candidates.kept_there)
        ]
        return other_outputs, other_orders

    def _improved(self, *candidates: Sequence[Candidate]) -> bool:
        """Places these candidates, one list after the other while there is hope, and simulates the likeliest. Returns whether
        one is the best now."""
        if not candidates[0]:
            return False
        placing = Placing(self.one.model, self.one.hardware, asked_with(self.one.request, candidates[0][0]))
        before, found = self.best, dict[Placed, Candidate]()
        for some in candidates:
            found |= {placed: candidate for candidate in some if (placed := self._placed(placing, candidate)) is not None}
            if found and not any(map(self._may_win, found)):  # none: all of them write too much
                return False
        likely = sorted(filter(self._may_win, found), key=lambda placed: (placed.estimate, found[placed]))
        # Of two alike, the second tells little: it is the one that writes least.
        least = sorted(likely[1:], key=lambda placed: placed.plan.predicted.written_per_step)[: _TRIES - 1]
        for placed in [*likely[:1], *least]:
            if placed.bound < self.best.seconds and self._may_simulate(len(placed.schedule.visits)):
                self._compare(self._simulated(placing, placed, found[placed]))
        return self.best is not before

    def _may_win(self, placed: Placed) -> bool:
        return placed.bound < self.best.seconds and placed.estimate < _FAR * self.best.seconds

    def _placed(self, placing: Placing, candidate: Candidate) -> Placed | None:
        self.placed += len(placing.model.stages)
        placed = placing.placed(candidate)
        if placed is None or placed.plan.predicted.written_per_step > self._most_written:
            return None
        return placed if not self.with_room or placing.request.has_room_for(placed.plan, placing.hardware) else None

    def _may_simulate(self, visits: int) -> bool:
        return self.visits + STEPS * visits <= self._limit

    def _simulated(self, placing: Placing, placed: Placed, candidate: Candidate) -> Alternative:
        timeline = simulate(placing.model, placing.hardware, placed.plan, placed.schedule, costs=placing.costs, jobs=False)
        self.visits += STEPS * len(placed.schedule.visits)
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
        elif request.wear == "balanced":
            better = price(tried, self.one.hardware) < price(before, self.one.hardware) * (1 - GAIN)
        elif max(tried.seconds, before.seconds) <= self._shortest * (1 + WORTH):
            better = seconds_and_bytes(tried) < seconds_and_bytes(before) * (1 - GAIN)
        else:
            better = tried.seconds < before.seconds
        self.best = tried if better else before
