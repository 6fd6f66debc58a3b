"""Chooses which of a drive's two write rates a run is planned with, and computes how long the fast one lasts.

A drive writes fast until its fast region is full. A run is planned with the sustained rate from its first step on, unless it
will certainly end before the region is full. A run of unknown length counts as long. Idle time or a trim may free space again;
this is not counted, because nobody has measured how much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..spec.hardware import HardwareProfile
from ..spec.model import ModelSpec
from ..spec.plan import Plan
from .commit_interval import timed_plan
from .plan_request import PlanRequest

Choose = Callable[[ModelSpec, HardwareProfile, PlanRequest], Plan]


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


def planned_for(choose: Choose, model: ModelSpec, hardware: HardwareProfile, request: PlanRequest, *, steps: int) -> Plan:
    """Returns the plan that `choose` finds for a run of `steps` (0: unknown, counts as many), at the rates its drives have for
    most of the run. These are the sustained rates if the best plan at first rates would write past the fast region."""
    if not hardware.slows_down:
        return choose(model, hardware, request)
    if steps and steps * least_written(model, request) <= hardware.burst_bytes:
        plan = choose(model, hardware, request)
        if not leaves_fast_region(plan, hardware, steps):
            return plan
    return choose(model, hardware, replace(request, sustained=True))


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
