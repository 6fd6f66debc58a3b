"""Keeps what a search has seen so far, and chooses what it looks at next."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

from ..spec.plan import Plan
from .candidate import Candidate, Family
from .place import Placed, Placing
from .simulate import STEPS, Timeline, simulate

# Limit on stages of candidates that one search and refining its best place: a second on an old core, with the simulations.
MOST_PLACED = 6_000
MOST_VISITS = 5_800  # limit on visits that one search simulates, over all steps
SMALL_STAGES = 30  # of a small model
SHORTER = 0.2  # share of both limits for a search that follows another
GAIN = 1e-3  # share of the step; a candidate that needs more memory must be faster by more than this
_LEAST = 4  # simulations that are always allowed, however large the model
_PATIENCE = 5_000  # visits simulated in a row without a better candidate, and
_TRIES = 8  # simulations in a row without a better candidate, after which the search ends
_ALIKE = 6  # simulations in a row without a better candidate, after which other candidates are tried as well
_AGAIN = 4  # placing a new plan costs this many times as much as placing a candidate that leads to a known plan

Effort = Literal["limited", "placed", "exhaustive"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Alternative:
    """Describes a candidate that fits, with what is known about it so far. Seconds are per step."""

    candidate: Candidate
    plan: Plan
    bound: float = 0.0  # no step of it is faster
    estimate: float = 0.0
    commits: float = 0.0  # the part of these that commits take, if they are more than a step apart
    timeline: Timeline | None = None  # without such commits; None: ruled out by its bound, or not simulated yet

    @property
    def seconds(self) -> float:
        return max(self.bound, self.estimate) if self.timeline is None else self.timeline.step_seconds + self.commits


def _any(candidate: Candidate, plan: Plan) -> bool:
    return True


@dataclass(slots=True)
class SearchState:
    """Holds what a search has seen so far. Each candidate is placed once, and each plan is simulated once."""

    placing: Placing
    pipelines: tuple[tuple[int, int], ...]
    with_room: bool  # accept only plans that disk and device have room for
    effort: Effort
    allows: Callable[[Candidate, Plan], bool] = _any  # the search skips all others
    share: float = 1.0  # share of the limits of a search
    for_refining: int = 0  # stages that refining the best may place, and this search may not
    placed: int = 0
    visits: int = 0
    in_vain: int = 0  # visits simulated since the best was found
    best: Alternative | None = None  # the fastest so far
    pool: dict[Placed, Alternative] = field(default_factory=dict)
    _seen: set[Placed] = field(default_factory=set, init=False)
    _tried: set[Candidate] = field(default_factory=set, init=False)
    _looked_around: set[Candidate] = field(default_factory=set, init=False)
    _simulations: int = field(default=0, init=False)
    _values: dict[tuple[str, object], int] = field(default_factory=dict, init=False)  # knob and value -> how often simulated
    # Pipeline -> ratios of simulated steps to estimates.
    _longer: dict[tuple[int, int], list[float]] = field(default_factory=dict, init=False)

    # ---- placing -------------------------------------------------------------------------------------------------------

    def _may_place(self) -> bool:
        most = self.share * MOST_PLACED - self.for_refining
        return self.effort != "limited" or self.placed + len(self.placing.model.stages) <= most

    def place(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            if not self._may_place():
                return
            self._place(candidate)

    def place_one(self, candidates: Iterable[Candidate]) -> None:
        """Places the first candidate that fits."""
        for candidate in candidates:
            self._place(candidate)
            if self.pool:
                return

    def _place(self, candidate: Candidate) -> None:
        if candidate in self._tried or not self._may_place():
            return
        self._tried.add(candidate)
        found, known = self.placing.placed(candidate), len(self._seen)
        self.placed += counted(found, len(self.placing.model.stages), self._seen)
        if found is not None and len(self._seen) > known and self._fits(candidate, found.plan):
            self.pool[found] = Alternative(
                candidate=candidate, plan=found.plan, bound=found.bound, estimate=found.estimate, commits=found.commits
            )

    def _fits(self, candidate: Candidate, plan: Plan) -> bool:
        has_room = not self.with_room or self.placing.request.has_room_for(plan, self.placing.hardware)
        return has_room and self.allows(candidate, plan)

    def among(self, allows: Callable[[Candidate, Plan], bool]) -> SearchState:
        """Returns a shorter search that sees only what `allows` accepts. It starts with what this one has seen."""
        other = replace(self, allows=allows, share=SHORTER, for_refining=0, pool={}, best=None, placed=0, visits=0, in_vain=0)
        other.learn_from(self)
        return other

    def learn_from(self, other: SearchState) -> None:
        """Takes over what another search with the same placing has seen, if this one allows it."""
        for key, found in other.pool.items():
            known = self.pool.get(key)
            if not self._fits(found.candidate, found.plan) or (known is not None and known.timeline is not None):
                continue
            self.pool[key] = found
            self._seen.add(key)
            if found.timeline is not None and (self.best is None or found.seconds < self.best.seconds):
                self.best = found

    def look_around(self, candidates: Family) -> bool:
        """Places the candidates that differ in one knob from the best simulated candidate whose neighbours are not placed yet.
        Returns whether there was one."""
        simulated = [found for found in self.pool.values() if found.timeline and found.candidate not in self._looked_around]
        if not simulated or not self._may_place():
            return False
        nearest = min(simulated, key=lambda found: (found.seconds, found.candidate))
        self._looked_around.add(nearest.candidate)
        self.place(candidates.lines(nearest.candidate))
        return True

    # ---- simulating ----------------------------------------------------------------------------------------------------

    def likeliest(self) -> tuple[Placed | None, bool]:
        """Returns the likeliest fast candidate that is not simulated yet, and whether it is likely to be the best."""
        expected = self._expectation()
        left = {found.candidate: (expected(found), key) for key, found in self.pool.items() if self._may_win(found)}
        if not left:
            return None, False
        if self.in_vain >= _ALIKE * self._one and self._simulations % 2:
            candidate = min(left, key=lambda candidate: (self._known_of(candidate), left[candidate][0], candidate))
            return left[candidate][1], True
        seconds, _, key = min((seconds, candidate, key) for candidate, (seconds, key) in left.items())
        return key, self.best is None or seconds < self.best.seconds

    def _expectation(self) -> Callable[[Alternative], float]:
        """Returns a function that predicts the seconds of a step from what is known now. Estimates ignore waits for slots."""
        longer = {pipeline: self._longer_with(place) for place, pipeline in enumerate(self.pipelines)}
        return lambda found: max(
            found.bound, found.estimate * longer[found.candidate.lookahead, found.candidate.gradient_slots]
        )

    def _known_of(self, candidate: Candidate) -> int:
        """Returns how often the least simulated of the candidate's values was simulated. A wrong estimate is wrong for all
        similar candidates, so every second simulation takes a candidate with a value that few had before."""
        return min(self._values.get(value, 0) for value in candidate.values())

    def _longer_with(self, place: int) -> float:
        """Returns the ratio of simulated steps to their estimates, for this pipeline or the next larger one. With fewer slots,
        more work waits for them."""
        known = [self._longer[pipeline] for pipeline in self.pipelines[place:] if pipeline in self._longer]
        return sum(known[0]) / len(known[0]) if known else 1.0

    def knows_all_of(self, candidates: Family) -> bool:
        """Tells whether every candidate was placed and none that is left can win."""
        return len(self._tried) == len(candidates) and not any(self._may_win(found) for found in self.pool.values())

    def _may_win(self, found: Alternative) -> bool:
        return found.timeline is None and (self.best is None or found.bound < self.best.seconds)

    def is_patient(self) -> bool:
        """Tells whether the search should go on because a better candidate is still likely."""
        return self.effort != "limited" or self.in_vain < max(_PATIENCE, _TRIES * self._one)

    @property
    def _one(self) -> int:
        """Returns about how many visits one simulation takes."""
        return 2 * len(self.placing.model.stages) * STEPS

    def may_simulate(self) -> bool:
        """Tells whether one more simulation stays within the search's limits."""
        one = self._one
        return self.effort == "exhaustive" or self.visits + one <= self.share * max(MOST_VISITS, _LEAST * one)

    def simulate(self, key: Placed) -> None:
        found = self.pool[key]
        placing = self.placing
        timeline = simulate(placing.model, placing.hardware, found.plan, key.schedule, costs=placing.costs, jobs=False)
        visits = STEPS * len(key.schedule.visits)
        self.visits, self.in_vain = self.visits + visits, self.in_vain + visits
        found = self.pool[key] = replace(found, timeline=timeline)
        pipeline = (found.candidate.lookahead, found.candidate.gradient_slots)
        self._longer.setdefault(pipeline, []).append(found.seconds / found.estimate if found.estimate else 1.0)
        self._simulations += 1
        for value in found.candidate.values():
            self._values[value] = self._values.get(value, 0) + 1
        if self.best is None or found.seconds < self.best.seconds:
            self.best, self.in_vain = found, 0

    # ---- the end -------------------------------------------------------------------------------------------------------

    def cheapest(self, *, at_most: float = inf) -> Alternative:
        """Returns the candidate that needs least among those about as fast as the fastest and not slower than `at_most`
        (seconds)."""
        assert self.best is not None
        return min(self.simulated_within(min(self.best.seconds * (1 + GAIN), at_most)), key=asked_for)

    def simulated_within(self, seconds: float) -> list[Alternative]:
        return [found for found in self.pool.values() if found.timeline is not None and found.seconds <= seconds]

    def others(self, best: Alternative) -> tuple[Alternative, ...]:
        seen = [found for found in self.pool.values() if found is not best]
        return tuple(sorted(seen, key=lambda found: (found.timeline is None, found.seconds, found.candidate)))


def asked_for(found: Alternative) -> tuple[int, int, float, Candidate]:
    predicted = found.plan.predicted
    return predicted.written_per_step, predicted.cpu_peak, found.seconds, found.candidate


def counted(found: Placed | None, stages: int, seen: set[Placed]) -> int:
    """Returns how many stages count as placed, and adds the plan to those seen. Known plans and none take less time."""
    if found is None or found in seen:
        return -(-stages // _AGAIN)
    seen.add(found)
    return stages
