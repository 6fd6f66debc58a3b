"""`search(...)`: the fastest plan of a family of choices, by simulation.

Placing a choice is cheap beside simulating it, and says two things of it: a bound that its step cannot beat, and an estimate.
The likeliest is simulated first. What simulations show to be better than all before is looked at from all sides: every other
value of each of its knobs is placed, and simulated in its turn. The search ends where what is left cannot be better by
its bound, or where many simulations in a row have found nothing better, or at a fixed amount of work, whatever the size of
the model. Of small models most choices are placed. Nothing here depends on a clock: the same inputs give the same plan.

How near that comes to the best of the whole family: of a small one every choice is placed, and as a rule all are simulated
that their bounds do not rule out; then it is the best, and `complete` says so. A search as limited as that of a large family
finds, of the small ones of tests/planner/test_search.py, a step at most `NEAR` longer than the best. Of a hundred stages a few
dozen choices are placed and eight simulated: nobody knows what the best is.

Choices fill RAM in a fixed order. Of a model of few tensors the sets of them that fit are looked at as well (`picks`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Literal

from ..spec.hardware import HardwareProfile
from ..spec.model import ModelSpec
from ..spec.plan import Plan
from .choice import NONE_PICKED, Choice, Family, family
from .place import Placed, Placing, too_small
from .schedule import plan_schedule
from .simulate import STEPS, simulate
from .timeline import Timeline
from .wishes import Wishes

MOST_PLACED = 6_000  # stages of choices that one search places at most: a second on an old core, with the simulations
MOST_VISITS = 6_500  # of all steps that one search simulates at most
SMALL, SMALL_STAGES = 66_000, 30  # stages of all choices, and of a model, whose family is placed whole: a second as well
NEAR = 0.05  # of the step: nearly always it is the best itself
_LEAST = 4  # simulations, however large the model is
_PATIENCE = 5_000  # visits simulated in a row that find nothing better,
_TRIES = 8  # in so many simulations
_ALIKE = 6  # simulations in vain, after which something else is tried as well
_AGAIN = 4  # what it costs to place a choice is this many times what it costs where it comes to a plan known already
_PICKS, _SKELETONS = 128, 24  # of sets of tensors placed with one choice, and of choices that differ in more than those
_CLIMBS = 3  # to what is faster, from the fastest of so many pipelines
_VAIN_PICKS = 64  # simulations of such sets in a row that find nothing better
GAIN = 1e-3  # of the step: a choice that asks for more must be faster by more


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Alternative:
    """A choice that fits, as far as it was looked at. Seconds per step."""

    choice: Choice
    plan: Plan
    bound: float  # that its step cannot beat
    estimate: float
    timeline: Timeline | None  # None: ruled out by its bound, or not come to

    @property
    def seconds(self) -> float:
        return self.timeline.step_seconds if self.timeline is not None else max(self.bound, self.estimate)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a search saw."""

    best: Alternative
    others: tuple[Alternative, ...]  # simulated ones first, then by bound
    complete: bool  # no choice of the family is better
    placed: int  # stages of all choices placed
    visits: int  # simulated


Effort = Literal["limited", "placed", "exhaustive"]


def search(model: ModelSpec, hardware: HardwareProfile, wishes: Wishes, *, effort: Effort | None = None) -> Found:
    """The best choice and those that lost. Raises PlanError where nothing fits. `effort`: `limited` in what is placed and
    simulated; with every choice `placed`; or `exhaustive`, with all simulated that may be the best, however long that takes.
    By default that of a small family is placed whole."""
    choices = family(model, wishes)
    if hardware.measured == "assumed":  # a guess may be far off: it is no reason to write more to a drive
        choices = replace(choices, activations=(0.0,), swap=choices.swap[:1])
    placing = Placing(model, hardware, wishes)
    stages = len(model.stages)
    is_small = stages <= SMALL_STAGES and len(choices) * stages <= SMALL
    effort = effort or ("placed" if is_small else "limited")
    for with_room in (True, False):  # what overflows disk or device is refused by name, by who knows what is there already
        looking = _Looking(placing=placing, pipelines=choices.pipelines, with_room=with_room, effort=effort)
        with _uncollected():
            complete = _explored(looking, choices)
            if looking.best is not None:
                looking.look_closer(choices)
        if looking.best is not None:
            best = looking.cheapest()
            return Found(
                best=best, others=looking.others(best), complete=complete, placed=looking.placed, visits=looking.visits
            )
    raise too_small(model, hardware, wishes)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's cycle collector, which looks through all plans found so far again and again and frees none: a third of
    a search's time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def fastest(model: ModelSpec, hardware: HardwareProfile, wishes: Wishes) -> Plan:
    """The best choice's plan, with what its step takes. Raises PlanError where nothing fits."""
    return timed(search(model, hardware, wishes).best, model, hardware)


def timed(found: Alternative, model: ModelSpec, hardware: HardwareProfile) -> Plan:
    """The plan, its figures of time simulated."""
    plan = found.plan
    step = found.timeline or simulate(model, hardware, plan, plan_schedule(model, plan))
    predicted = replace(
        plan.predicted, step_seconds=step.step_seconds, forward_seconds=step.forward_seconds, stalls=step.stalls
    )
    return replace(plan, predicted=predicted)


def _explored(looking: _Looking, choices: Family) -> bool:
    """Looks at the family, the likeliest choices first; whether none of it can be better than the best."""
    looking.place(choices.corners() if looking.effort == "limited" else choices)
    if not looking.pool:
        looking.place_one(choices.smallest())
    if not looking.pool:
        return False
    spread = False
    while looking.is_patient():
        found, promising = looking.likeliest()
        if not promising and looking.look_around(choices):
            continue
        if not promising and not spread:
            looking.place(choices.mixed())
            spread = True
            continue
        if found is None or not looking.may_simulate():
            break
        looking.simulate(found)
    return looking.knows_all_of(choices)


@dataclass(slots=True)
class _Looking:
    """What was seen so far; a choice is placed once, and a plan simulated once."""

    placing: Placing
    pipelines: tuple[tuple[int, int], ...]
    with_room: bool  # only plans that disk and device have room for
    effort: Effort
    placed: int = 0
    visits: int = 0
    in_vain: int = 0  # of the visits, since the best was found
    best: Alternative | None = None  # the fastest
    pool: dict[int, Alternative] = field(default_factory=dict)  # by the identity of the plan
    _plans: dict[int, Placed] = field(default_factory=dict)
    _tried: set[Choice] = field(default_factory=set)
    _looked_around: set[Choice] = field(default_factory=set)
    _simulations: int = 0
    _values: dict[tuple[str, object], int] = field(default_factory=dict)  # of knobs: how often they were simulated
    _longer: dict[tuple[int, int], list[float]] = field(default_factory=dict)  # by pipeline: steps beside their estimates

    # ---- placing -------------------------------------------------------------------------------------------------------

    def _may_place(self) -> bool:
        return self.effort != "limited" or self.placed + len(self.placing.model.stages) <= MOST_PLACED

    def place(self, choices: Iterable[Choice]) -> None:
        for choice in choices:
            self._place(choice)

    def place_one(self, choices: Iterable[Choice]) -> None:
        """The first that fits."""
        for choice in choices:
            self._place(choice)
            if self.pool:
                return

    def _place(self, choice: Choice) -> None:
        if choice in self._tried or not self._may_place():
            return
        self._tried.add(choice)
        found, stages = self.placing.placed(choice), len(self.placing.model.stages)
        if found is None or id(found) in self._plans:
            self.placed += -(-stages // _AGAIN)
            return
        self.placed += stages
        self._plans[id(found)] = found
        if self._fits(found.plan):
            self.pool[id(found)] = Alternative(
                choice=choice, plan=found.plan, bound=found.bound, estimate=found.estimate, timeline=None
            )

    def _fits(self, plan: Plan) -> bool:
        return not self.with_room or self.placing.wishes.has_room_for(plan, self.placing.hardware)

    def look_around(self, choices: Family) -> bool:
        """Places what differs in one knob from the best simulated choice around which nobody looked yet; whether there is
        one."""
        simulated = [found for found in self.pool.values() if found.timeline and found.choice not in self._looked_around]
        if not simulated or not self._may_place():
            return False
        nearest = min(simulated, key=lambda found: (found.seconds, found.choice))
        self._looked_around.add(nearest.choice)
        self.place(choices.lines(nearest.choice))
        return True

    # ---- simulating ----------------------------------------------------------------------------------------------------

    def likeliest(self) -> tuple[int | None, bool]:
        """Of those not simulated, which may still be better than the best, the one that is likeliest to be fast; whether it
        is likely to be the best."""
        expected = self._expectation()
        left = [((expected(found), found.choice), key) for key, found in self.pool.items() if self._may_win(found)]
        if not left:
            return None, False
        if self.in_vain >= _ALIKE * self._one and self._simulations % 2:
            key = min((self._known_of(self.pool[key].choice), seconds, key) for seconds, key in left)[2]
            return key, True
        (seconds, _), key = min(left)
        return key, self.best is None or seconds < self.best.seconds

    def _expectation(self) -> Callable[[Alternative], float]:
        """Seconds that a step may take, by what is known now. The estimate knows nothing of what waits for slots."""
        longer = {pipeline: self._longer_with(place) for place, pipeline in enumerate(self.pipelines)}
        return lambda found: max(found.bound, found.estimate * longer[found.choice.lookahead, found.choice.gradient_slots])

    def _known_of(self, choice: Choice) -> int:
        """How often the value of one of its knobs was simulated that was so least. Where estimates are wrong they are wrong of
        all that is alike: then every other choice simulated has something that few before had."""
        return min(self._values.get(value, 0) for value in choice.values())

    def _longer_with(self, place: int) -> float:
        """How much longer than their estimates the steps simulated so far were, with this pipeline or the next larger one:
        with fewer slots more waits for them."""
        known = [self._longer[pipeline] for pipeline in self.pipelines[place:] if pipeline in self._longer]
        return sum(known[0]) / len(known[0]) if known else 1.0

    def knows_all_of(self, choices: Family) -> bool:
        """Whether every choice was placed, and none of them may still win."""
        return len(self._tried) == len(choices) and not any(self._may_win(found) for found in self.pool.values())

    def _may_win(self, found: Alternative) -> bool:
        return found.timeline is None and (self.best is None or found.bound < self.best.seconds)

    def is_patient(self) -> bool:
        """Whether the best may not be the best yet."""
        return self.effort != "limited" or self.in_vain < max(_PATIENCE, _TRIES * self._one)

    @property
    def _one(self) -> int:
        """Visits of one simulation, about."""
        return 2 * len(self.placing.model.stages) * STEPS

    def may_simulate(self) -> bool:
        """Whether one more simulation is within what a search may take."""
        one = self._one
        return self.effort == "exhaustive" or self.visits + one <= max(MOST_VISITS, _LEAST * one)

    def _simulated(self, found: Alternative) -> Alternative:
        schedule = plan_schedule(self.placing.model, found.plan)
        timeline = simulate(self.placing.model, self.placing.hardware, found.plan, schedule)
        visits = STEPS * len(schedule.visits)
        self.visits, self.in_vain = self.visits + visits, self.in_vain + visits
        found = replace(found, timeline=replace(timeline, work=(), asked=()))  # of thousands, which nobody asks a search for
        pipeline = (found.choice.lookahead, found.choice.gradient_slots)
        self._longer.setdefault(pipeline, []).append(found.seconds / found.estimate if found.estimate else 1.0)
        return found

    def simulate(self, key: int) -> None:
        found = self.pool[key] = self._simulated(self.pool[key])
        self._simulations += 1
        for value in found.choice.values():
            self._values[value] = self._values.get(value, 0) + 1
        if self.best is None or found.seconds < self.best.seconds:
            self.best, self.in_vain = found, 0

    # ---- sets of tensors ------------------------------------------------------------------------------------------------

    def look_closer(self, choices: Family) -> None:
        """Looks at what else could be in RAM than what the choices come to, where a model is small enough for that."""
        assert self.best is not None
        if not self.placing.is_small(self.best.choice):
            return
        was_in_ram = _is_in_ram(self.best.plan)
        self._climb(self.best)
        if was_in_ram:  # then sets are no question of what fits
            return
        in_vain = 0
        for pick in self._likeliest_first(self._picked(choices)):
            if in_vain < _VAIN_PICKS:
                in_vain = in_vain + 1 if self._beaten_by(pick, self.best) is None else 0
        for start in self._starts():
            self._climb(start)

    def _picked(self, choices: Family) -> Iterator[Alternative]:
        """With what choices have beside tensors in RAM, the sets of those that save most traffic."""
        for choice in islice(self._skeletons(choices), _SKELETONS):
            yield from self._placed_anew(islice(self.placing.picks(choice), _PICKS))

    def _climb(self, start: Alternative) -> None:
        """To what is faster and differs in little, and on from there."""
        at: Alternative | None = start
        while at is not None:
            near = self._placed_anew(self.placing.near(at.choice, at.plan, self.pipelines))
            at = next((better for found in self._likeliest_first(near) if (better := self._beaten_by(found, at))), None)

    def _likeliest_first(self, candidates: Iterable[Alternative]) -> list[Alternative]:
        """Of what seems equal that first which moves less."""
        expected = self._expectation()

        def order(found: Alternative) -> tuple[float, int, Choice]:
            predicted = found.plan.predicted
            return expected(found), predicted.read_per_step + predicted.written_per_step, found.choice

        return sorted(candidates, key=order)

    def _beaten_by(self, found: Alternative, than: Alternative | None) -> Alternative | None:
        """It, simulated, if it is faster."""
        assert self.best is not None and than is not None
        if found.bound >= than.seconds:
            return None
        found = self.pool[id(found)] = self._simulated(found)
        if found.seconds < self.best.seconds:
            self.best = found
        return found if found.seconds < than.seconds else None

    def _starts(self) -> list[Alternative]:
        """The fastest of every pipeline, the fastest of those first."""
        fastest: dict[object, Alternative] = {}
        simulated = (found for found in self.pool.values() if found.timeline is not None)
        for found in sorted(simulated, key=lambda found: (found.seconds, found.choice)):
            fastest.setdefault((found.choice.lookahead, found.choice.gradient_slots), found)
        return list(fastest.values())[:_CLIMBS]

    def _skeletons(self, choices: Family) -> Iterator[Choice]:
        """What is left of choices without the tensors that they move to RAM, of the fastest first, of what does not fit with
        none there last."""
        known = sorted(self.pool.values(), key=lambda found: (found.seconds, found.choice))
        bare = (
            replace(choice, states=0.0, activations=min(choice.activations, 0.0), picked=NONE_PICKED)
            for choice in chain((found.choice for found in known), choices)
        )
        yield from dict.fromkeys(bare)

    def _placed_anew(self, choices: Iterable[Choice]) -> Iterator[Alternative]:
        """Those that come to plans that nobody saw yet."""
        for choice in choices:
            found = self.placing.placed(choice)
            if found is None or id(found) in self._plans:
                continue
            self._plans[id(found)] = found
            if self._fits(found.plan):
                yield Alternative(choice=choice, plan=found.plan, bound=found.bound, estimate=found.estimate, timeline=None)

    # ---- the end -------------------------------------------------------------------------------------------------------

    def cheapest(self) -> Alternative:
        """Of those about as fast as the fastest, the one that asks for least."""
        assert self.best is not None
        limit = self.best.seconds * (1 + GAIN)
        alike = [found for found in self.pool.values() if found.timeline is not None and found.seconds <= limit]
        return min(alike, key=_asked)

    def others(self, best: Alternative) -> tuple[Alternative, ...]:
        seen = [found for found in self.pool.values() if found is not best]
        return tuple(sorted(seen, key=lambda found: (found.timeline is None, found.seconds, found.choice)))


def _is_in_ram(plan: Plan) -> bool:
    homes = ((stage.weights, stage.states, stage.gradients, stage.boundary) for stage in plan.stages)
    return all("ssd" not in tiers for tiers in homes)


def _asked(found: Alternative) -> tuple[int, int, float, Choice]:
    predicted = found.plan.predicted
    return predicted.written_per_step, predicted.cpu_peak, found.seconds, found.choice
