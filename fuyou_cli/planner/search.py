"""`search(...)`: the fastest plan of a family of choices, by simulation.

A choice that fits has a bound from the closed form that its step cannot beat; one whose bound is no better than the best
simulated step is not simulated. Of small models every choice is looked at, so that the answer is the family's best. Of large
ones a few that differ much are ranked by a closed-form estimate, and from the best of them the search climbs: one knob one
notch at a time, as long as the step gets faster and for a fixed number of simulations. Nothing here depends on a
clock: the same inputs give the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..spec.hardware import HardwareProfile
from ..spec.model import ModelSpec
from ..spec.plan import Plan
from .bound import lower_bound, phase_estimate
from .choice import Choice, Family, family
from .costs import Costs
from .place import made_of, too_small
from .schedule import plan_schedule
from .simulate import simulate
from .timeline import Timeline
from .wishes import Wishes

_VISITS = 1500  # that one search simulates at most, times steps
_LEAST = 8  # simulations, however large the model is
_SMALL = 400  # choices times visits: up to this many every choice is looked at
_GAIN = 1e-3  # of the step: a choice further from the usual one must be faster by more


@dataclass(frozen=True, kw_only=True, slots=True)
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


def search(model: ModelSpec, hardware: HardwareProfile, wishes: Wishes, *, exhaustive: bool | None = None) -> Found:
    """The best choice and those that lost. Raises PlanError where nothing fits. `exhaustive` looks at every choice however
    large the model is, or never does."""
    choices = family(model, wishes)
    if hardware.measured == "assumed":  # a guess may be far off: it is no reason to write more to a drive
        choices = replace(choices, activations=choices.activations[:1], swap=choices.swap[:1])
    visits = 2 * len(model.stages)
    everything = len(choices) * visits <= _SMALL if exhaustive is None else exhaustive
    most = len(choices) if everything else max(_LEAST, _VISITS // visits)
    for limited in (True, False):  # what overflows disk or device is refused by name, by who knows what is there already
        looking = _Looking(model=model, hardware=hardware, wishes=wishes, most=most, limited=limited)
        if everything:
            for alternative in sorted(filter(None, map(looking.fitting, choices)), key=lambda found: found.bound):
                looking.simulated(alternative)
        else:
            _climb(looking, choices)
        if looking.best is not None:
            break
    else:
        raise too_small(model, hardware, wishes)
    return Found(best=looking.best, others=looking.others(), complete=everything)


def fastest(model: ModelSpec, hardware: HardwareProfile, wishes: Wishes) -> Plan:
    """The best choice's plan, with what its step takes. Raises PlanError where nothing fits."""
    return timed(search(model, hardware, wishes).best, model, hardware)


def timed(found: Alternative, model: ModelSpec, hardware: HardwareProfile) -> Plan:
    """The plan, its figures of time simulated."""
    plan = found.plan
    step = simulate(model, hardware, plan, plan_schedule(model, plan))
    predicted = replace(
        plan.predicted, step_seconds=step.step_seconds, forward_seconds=step.forward_seconds, stalls=step.stalls
    )
    return replace(plan, predicted=predicted)


@dataclass(slots=True)
class _Looking:
    """What was seen so far; a choice is placed once and simulated once."""

    model: ModelSpec
    hardware: HardwareProfile
    wishes: Wishes
    most: int  # simulations
    limited: bool  # to the disk there is and the memory of the device
    best: Alternative | None = None
    _seen: dict[Choice, Alternative | None] = field(default_factory=dict)

    def fitting(self, choice: Choice) -> Alternative | None:
        """The choice placed, with its closed-form figures; None where it does not fit."""
        if choice not in self._seen:
            plan = made_of(self.model, self.hardware, self.wishes, choice)
            self._seen[choice] = self._figures(choice, plan) if plan is not None and self._fits(plan) else None
        return self._seen[choice]

    def _fits(self, plan: Plan) -> bool:
        device = self.wishes.gpu_budget
        on_device = device is None or plan.predicted.gpu_peak <= device
        disk = self.hardware.disk_free if self.wishes.ssd_budget is None else self.wishes.ssd_budget
        return not self.limited or (plan.store_size <= disk and on_device)

    def _figures(self, choice: Choice, plan: Plan) -> Alternative:
        costs = Costs.of(self.model, self.hardware, plan)
        schedule = plan_schedule(self.model, plan)
        return Alternative(
            choice=choice,
            plan=plan,
            bound=lower_bound(costs, schedule, plan),
            estimate=phase_estimate(costs, schedule, stages=plan.stages, device=plan.device),
            timeline=None,
        )

    def simulated(self, alternative: Alternative) -> bool:
        """Simulates a choice that may be the best; whether it is now."""
        best = self.best
        if alternative.timeline is not None or (best is not None and alternative.bound >= best.seconds) or not self.most:
            return False
        self.most -= 1
        plan = alternative.plan
        timeline = simulate(self.model, self.hardware, plan, plan_schedule(self.model, plan), steps=2)
        found = self._seen[alternative.choice] = replace(alternative, timeline=timeline)
        if best is None or _better(found, best):
            self.best = found
            return True
        return False

    def others(self) -> tuple[Alternative, ...]:
        seen = [found for found in self._seen.values() if found is not None and found is not self.best]
        return tuple(sorted(seen, key=lambda found: (found.timeline is None, found.seconds, found.choice)))


def _better(one: Alternative, other: Alternative) -> bool:
    """Faster; of two about as fast the one that asks for less."""
    if abs(one.seconds - other.seconds) > _GAIN * other.seconds:
        return one.seconds < other.seconds
    return (one.plan.predicted.written_per_step, one.plan.predicted.cpu_peak, one.choice) < (
        other.plan.predicted.written_per_step, other.plan.predicted.cpu_peak, other.choice,
    )  # fmt: skip


def _climb(looking: _Looking, choices: Family) -> None:
    """From the likeliest of a few starts, notch by notch."""
    starts = [found for found in map(looking.fitting, choices.corners()) if found is not None]
    if not starts:
        starts = [found for found in map(looking.fitting, choices.smallest()) if found is not None][:1]
    for start in sorted(starts, key=lambda found: found.estimate)[:3]:
        looking.simulated(start)
    moved = True
    while moved and looking.most and looking.best is not None:
        moved = False
        for choice in choices.around(looking.best.choice):
            found = looking.fitting(choice)
            if found is not None and looking.simulated(found):
                moved = True
