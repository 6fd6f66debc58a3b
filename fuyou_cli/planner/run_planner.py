"""Plans a whole run: which of a drive's two write rates count, and where small trained banks rest.

A drive writes fast until its fast region is full. A run is planned with the sustained rate from its first step on, unless it
will certainly end before the region is full. A run of unknown length counts as long. Idle time or a trim may free space again;
this is not counted, because nobody has measured how much.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from ..core.errors import PlanError
from ..spec.hardware import HardwareProfile
from ..spec.model import ModelSpec
from ..spec.plan import Plan
from .commit_interval import timed_plan
from .place import Candidate, least_memory, made_of
from .place import plan as first_that_fits
from .plan_request import WORTH_WRITING, PlanRequest, ways_to_rest
from .search import SearchResult, search_timed

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
