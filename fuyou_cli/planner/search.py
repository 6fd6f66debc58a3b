"""Finds the fastest plan of a family of candidates, by simulation, that is worth the bytes it writes.

Placing a candidate is cheap. It gives a lower bound and an estimate of the step. The likeliest candidate is simulated first.
When a candidate is the best so far, the other values of each of its knobs are placed and simulated in turn. The search ends
when no candidate left can be better by its bound, when many simulations in a row found nothing better, or after a fixed amount
of work that does not depend on the model's size. It reads no clock: the same inputs give the same plan.

In a small family every candidate is placed, and usually all are simulated that their bounds do not rule out. Then the best is
the best of all, and `complete` says so. For a hundred stages a few dozen candidates are placed and eight simulated. On small
families such a limited search finds a step at most `NEAR` longer than the best (tests/planner/test_search.py).

If the fastest candidate spends drives for little, the candidates that do not are searched in the same way (`sparing`).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.errors import PlanError
from ..core.process import uncollected
from ..spec.hardware import HardwareProfile
from ..spec.model import ModelSpec
from ..spec.plan import Plan
from .boundary_layout import every_operator
from .candidate import Family, family, sweep_counts
from .commit_interval import timed_plan
from .costs import Costs
from .place import Placing, asked_with, too_small
from .plan_request import PlanRequest, WearPolicy
from .refinement import MOST_REFINED_VISITS, Refinement, left_for_refining
from .schedule import plan_schedule
from .search_state import SMALL_STAGES, Alternative, Effort, SearchState
from .simulate import STEPS
from .sparing import WORTH, Sparing, cost, spared

SMALL = 66_000  # stages of all candidates of a small model up to which a whole family is placed, which takes about a second
NEAR = 0.05  # share of the step; nearly always the search finds the best itself


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """Holds what a search found."""

    best: Alternative
    fastest: Alternative  # whatever it writes; `offload.wear: ignore` takes this one
    others: tuple[Alternative, ...]  # simulated ones first, then by bound
    complete: bool  # no candidate of the family is better
    placed: int  # stages of all candidates placed
    visits: int  # visits simulated
    costs: Costs = field(repr=False, compare=False)  # with what simulations found out: another one of these candidates is quick


def search(
    model: ModelSpec,
    hardware: HardwareProfile,
    request: PlanRequest,
    *,
    effort: Effort | None = None,
    candidates: Family | None = None,
) -> SearchResult:
    """Finds the best candidate and those that lost. Raises PlanError if nothing fits.

    `effort`: "limited" places and simulates few candidates, "placed" places all, "exhaustive" simulates all that may be the
    best. `candidates`: a part of the family, to look at nothing else.
    """
    return _search(Placing(model, hardware, request), effort, candidates or family(model, request))


def _search(placing: Placing, effort: Effort | None, candidates: Family) -> SearchResult:
    model, hardware, request = placing.model, placing.hardware, placing.asked
    if hardware.measured == "assumed":  # rates that are guesses may be far off, so they cannot justify writing more to a drive
        candidates = replace(candidates, activations=(0.0,), swap=candidates.swap[:1], fewer=())
    stages = len(model.stages)
    is_small = stages <= SMALL_STAGES and len(candidates) * stages <= SMALL
    effort = effort or ("placed" if is_small else "limited")
    # Plans without room on disk or device come second; the caller, who knows what is there already, refuses them with a clear
    # error.
    left = left_for_refining(model, request, candidates)
    for with_room in (True, False):
        looking = SearchState(
            placing=placing, pipelines=candidates.pipelines, with_room=with_room, effort=effort, for_refining=left
        )
        with uncollected():
            complete = _explored(looking, candidates)
            if looking.best is not None:
                return _refined(looking, candidates, _found(looking, candidates, complete=complete))
    in_sweeps = _in_sweeps(placing, effort, candidates)
    if in_sweeps is None:
        raise too_small(model, hardware, request)
    return in_sweeps


def _in_sweeps(placing: Placing, effort: Effort | None, candidates: Family) -> SearchResult | None:
    """Returns the best plan of several sweeps, whose fewer rows take less memory. It tries numbers of sweeps in order until one
    is no better, or its simulations would take long. None: none fits."""
    request, model, hardware, seen = placing.asked, placing.model, placing.hardware, list[SearchResult]()
    for count in sweep_counts(model, request)[1:]:
        if seen and STEPS * 2 * len(model.stages) * count > MOST_REFINED_VISITS:
            break
        with suppress(PlanError):
            found = _search(Placing(model, hardware, replace(request, sweeps=count)), effort, candidates)
            seen.append(_of_ways(found, sweeps=count))
        if len(seen) > 1 and _best_of(seen, request.wear) is not seen[-1]:
            break
    return _best_of(seen, request.wear) if seen else None


def _best_of(seen: list[SearchResult], policy: WearPolicy) -> SearchResult:
    limit = (1 + WORTH) * min(found.best.seconds for found in seen)
    return min((found for found in seen if found.best.seconds <= limit), key=lambda found: cost(found.best, policy))


def _of_ways(found: SearchResult, **way: Any) -> SearchResult:
    """Returns the result of a search with this number of sweeps or with free pages, for a request that leaves it open."""
    best, fastest, *others = (
        replace(one, candidate=replace(one.candidate, **way)) for one in (found.best, found.fastest, *found.others)
    )
    fastest = best if found.fastest is found.best else fastest
    return replace(found, best=best, fastest=fastest, others=tuple(others), complete=False)


def fastest(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> Plan:
    """Returns the best candidate's plan, with what its step takes. Raises PlanError if nothing fits."""
    return search_timed(model, hardware, request)[1]


def search_timed(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> tuple[SearchResult, Plan]:
    """Searches, and returns the best candidate's plan as well (`timed`). Raises PlanError if nothing fits."""
    found = _in_either_way(model, hardware, request)
    return found, timed(found.best, model, hardware, request, costs=found.costs)


def _in_either_way(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> SearchResult:
    """Searches with room for the heap's free pages and without, where activations are in RAM. Without it everything else has
    more, and blocks take longer."""
    if request.device != "cpu" or request.free_pages:
        return search(model, hardware, request)
    seen = list[SearchResult]()
    with suppress(PlanError):
        seen.append(_of_ways(search(model, hardware, replace(request, free_pages=True)), free_pages=True))
        if not _may_be_faster(seen[0], model, hardware, request):
            return seen[0]
    try:
        seen.append(search(model, hardware, request))
    except PlanError:
        if not seen:
            raise
    return _best_of(seen, request.wear)


def _may_be_faster(roomy: SearchResult, model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> bool:
    """Tells whether a plan without room for free pages may be faster than this one with it: whether computing alone, with
    every output kept and the pages faulted in, takes less time. Searching for it takes as long again."""
    plan, candidate = roomy.best.plan, replace(roomy.best.candidate, free_pages=False)
    stages = tuple(replace(stage, kept=kept) for stage, kept in zip(plan.stages, every_operator(model), strict=True))
    schedule = plan_schedule(model, replace(plan, stages=stages))
    costs = Costs.of(model, hardware, asked_with(request, candidate))
    return sum(costs.seconds_of(schedule.visits, stages)) < roomy.best.seconds


def timed(
    found: Alternative, model: ModelSpec, hardware: HardwareProfile, request: PlanRequest, *, costs: Costs | None = None
) -> Plan:
    """Returns the plan with simulated times, and with the commit interval that follows from them. `costs`: of the search."""
    chosen = request.commit_every == "auto"
    return timed_plan(model, hardware, found.plan, chosen=chosen, step=found.timeline, costs=costs)


def _found(every: SearchState, candidates: Family, *, complete: bool) -> SearchResult:
    """Returns the fastest candidate, or the one taken instead to spare the drives."""
    fastest, policy = every.cheapest(), every.placing.request.wear
    best, placed, visits = fastest, every.placed, every.visits
    sparing = Sparing(every.placing, candidates, fastest)
    if policy == "spare" and sparing.spends(fastest.candidate, fastest.plan):
        frugal = every.among(sparing.allows)
        complete = _explored(frugal, sparing.family) and complete
        best = spared(every, frugal)
        every.learn_from(frugal)
        placed, visits = placed + frugal.placed, visits + frugal.visits
    return SearchResult(
        best=best,
        fastest=fastest,
        others=every.others(best),
        complete=complete,
        placed=placed,
        visits=visits,
        costs=every.placing.costs,
    )


def _refined(every: SearchState, candidates: Family, found: SearchResult) -> SearchResult:
    """Returns the result with what refining the best finds: a faster plan, or one that `offload.wear` prefers."""
    refined = Refinement(every.placing, candidates, found.best, found.fastest, every.with_room)
    refined.refine()
    if not refined.seen:
        return found
    lost = [*refined.seen, found.best, *found.others]
    return replace(
        found,
        best=refined.best,
        fastest=min((found.fastest, *refined.seen), key=lambda one: one.seconds),
        others=tuple(one for one in lost if one is not refined.best),
        complete=False,
        placed=found.placed + refined.placed,
        visits=found.visits + refined.visits,
    )


def _explored(looking: SearchState, candidates: Family) -> bool:
    """Searches the family, likeliest candidates first. Returns whether no other candidate of it can be better than the best."""
    looking.place(candidates.corners() if looking.effort == "limited" else candidates)
    if not looking.pool:
        looking.place_one(candidates.smallest())
    if not looking.pool:
        return False
    spread = False
    while looking.is_patient():
        found, promising = looking.likeliest()
        if not promising and looking.look_around(candidates):
            continue
        if not promising and not spread:
            looking.place(candidates.mixed())
            spread = True
            continue
        if found is None or not looking.may_simulate():
            break
        looking.simulate(found)
    return looking.knows_all_of(candidates)
