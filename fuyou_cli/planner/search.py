"""Finds the fastest plan of a family of choices, by simulation, that is worth what it writes.

To place a choice is cheap, and gives a bound that its step cannot beat and an estimate of it. The likeliest is simulated first.
Around a choice that turns out best so far every other value of each of its knobs is placed and simulated in its turn. The
search ends where nothing left can be better by its bound, where many simulations in a row found nothing better, or at a fixed
amount of work, whatever the size of the model. No clock is read: the same inputs give the same plan.

Of a small family every choice is placed, and as a rule all are simulated that their bounds do not rule out: then the best is
the best of all, and `complete` says so. Of a hundred stages a few dozen choices are placed and eight simulated. A search that
is limited like that finds, of small families, a step at most `NEAR` longer than the best (tests/planner/test_search.py).

Where the fastest choice spends drives for little, those that do not are searched in the same way (`sparing`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ..spec.hardware import HardwareProfile
from ..spec.model import ModelSpec
from ..spec.plan import Plan
from .choice import Family, family
from .commit_interval import timed_plan
from .place import Placing, too_small
from .plan_request import PlanRequest
from .search_state import Alternative, Effort, SearchState
from .sparing import Sparing, balanced, spared
from .swept import Swept

SMALL, SMALL_STAGES = 66_000, 30  # stages of all choices, and of a model, whose family is placed whole: a second as well
NEAR = 0.05  # of the step: nearly always it is the best itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a search found."""

    best: Alternative
    fastest: Alternative  # whatever it writes: what `offload.wear: ignore` takes
    others: tuple[Alternative, ...]  # simulated ones first, then by bound
    complete: bool  # no choice of the family is better
    placed: int  # stages of all choices placed
    visits: int  # simulated


def search(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest, *, effort: Effort | None = None) -> Found:
    """Finds the best choice and those that lost. Raises PlanError where nothing fits.

    `effort`: "limited" places and simulates few, "placed" places every choice, "exhaustive" simulates all that may be the best.
    """
    choices = family(model, request)
    if hardware.measured == "assumed":  # a guess may be far off: it is no reason to write more to a drive
        choices = replace(choices, activations=(0.0,), swap=choices.swap[:1])
    placing = Placing(model, hardware, request)
    stages = len(model.stages)
    is_small = stages <= SMALL_STAGES and len(choices) * stages <= SMALL
    effort = effort or ("placed" if is_small else "limited")
    for with_room in (True, False):  # what overflows disk or device is refused by name, by who knows what is there already
        looking = SearchState(placing=placing, pipelines=choices.pipelines, with_room=with_room, effort=effort)
        with _uncollected():
            complete = _explored(looking, choices)
            if looking.best is not None:
                return _with_sweeps(looking, choices, _found(looking, choices, complete=complete))
    raise too_small(model, hardware, request)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turns the cycle collector off, which took a third of a search's time and freed nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def fastest(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> Plan:
    """Returns the best choice's plan, with what its step takes. Raises PlanError where nothing fits."""
    return timed(search(model, hardware, request).best, model, hardware, request)


def timed(found: Alternative, model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> Plan:
    """Returns the plan with simulated times, and with the commit interval that follows from them."""
    return timed_plan(model, hardware, found.plan, chosen=request.commit_every == "auto", step=found.timeline)


def _found(every: SearchState, choices: Family, *, complete: bool) -> Found:
    """Returns the fastest choice, or the one taken instead to spare the drives."""
    fastest, policy = every.cheapest(), every.placing.request.wear
    best, placed, visits = fastest, every.placed, every.visits
    sparing = Sparing(every.placing, choices, fastest)
    if policy == "balanced" or (policy == "spare" and sparing.spends(fastest.choice, fastest.plan)):
        frugal = every.among(sparing.allows)
        complete = _explored(frugal, sparing.family) and complete
        best = (spared if policy == "spare" else balanced)(every, frugal)
        every.learn_from(frugal)
        placed, visits = placed + frugal.placed, visits + frugal.visits
    return Found(best=best, fastest=fastest, others=every.others(best), complete=complete, placed=placed, visits=visits)


def _with_sweeps(every: SearchState, choices: Family, found: Found) -> Found:
    """Returns the same with a faster plan of several sweeps, if there is one."""
    swept = Swept(every.placing, choices, found.best, every.with_room)
    swept.look()
    if not swept.seen:
        return found
    lost = [*swept.seen, found.best, *found.others]
    return replace(
        found,
        best=swept.best,
        fastest=min(found.fastest, swept.best, key=lambda one: one.seconds),
        others=tuple(one for one in lost if one is not swept.best),
        complete=False,
        placed=found.placed + swept.placed,
        visits=found.visits + swept.visits,
    )


def _explored(looking: SearchState, choices: Family) -> bool:
    """Searches the family, likeliest choices first. Returns whether no other choice of it can be better than the best."""
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
