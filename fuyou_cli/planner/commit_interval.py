"""Chooses the number of steps between two commits, so that commits cost about what they save.

If states rest on the ssd, every step writes them anyway, so every step is committed. What rests in RAM is written only for a
commit, as part of each stage's update, which makes the steps around a commit longer. The interval is the shortest one with
which commits take little of the time and little of the bytes written. A run whose steps write almost nothing writes almost
only commits. There the limit on bytes yields once a kill would cost too much work.

The limit on time counts a commit as if it wrote alone. By simulation steps that compute for long hide it, but cores, memory and
drives that are busy with it slow them down. So a run of minutes is committed where it ends, which is a commit anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, floor, inf, sqrt

from ..spec.hardware import HardwareProfile
from ..spec.model import ModelSpec
from ..spec.plan import Plan, Span, StagePlan
from .bound import busy_seconds
from .costs import Costs
from .schedule import Schedule, plan_schedule, recommitted
from .simulate import STEPS, Timeline, simulate

# Share of a run's time that commits may take by plan; with this limit a commit that takes 20 % longer stays within 3 %.
MOST_TIME = 0.025
MOST_WRITTEN = 0.3  # share of a run's written bytes that commits may take
MOST_LOST = 1800.0  # seconds of work that a kill may cost when the limit on bytes asks for rarer commits
LITTLE_LOST = 600.0  # seconds of work; where a kill costs more, a plan says what to set for less
COMMITS = "commits"  # name of the stall
_SETTLING = 3  # steps from a commit until all of it is written: updates run on into the next step


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitCosts:
    """Holds what the commits of a plan cost, as shares of a step's averages, and what a kill may cost."""

    time: float
    written: float
    lost: float  # seconds of work at most: everything since the last commit, whose updates may end in the next step


def commit_costs(plan: Plan) -> CommitCosts | None:
    """Returns the cost of commits, or None if the plan makes at most one."""
    if plan.commit_every is None:
        return None
    step, written = plan.predicted.step_seconds, plan.predicted.written_per_step
    resting = resting_in_ram(plan) // plan.commit_every if plan.has_apart_commits else 0
    return CommitCosts(
        time=(step - plan.plain_seconds) / step if step else 0.0,
        written=min(1.0, resting / written) if written else 0.0,
        lost=(plan.commit_every + 1) * step,
    )


def sooner(model: ModelSpec, hardware: HardwareProfile, plan: Plan) -> Plan | None:
    """Returns the same plan with the most steps between commits with which a kill costs LITTLE_LOST, or with a commit every
    step where no longer interval does. Returns None for a plan whose kill costs no more, or only a step."""
    told, step = commit_costs(plan), plan.plain_seconds
    if step <= 0 or plan.commit_every == 1 or (told is not None and told.lost <= LITTLE_LOST):
        return None
    costs = Costs.of(model, hardware, plan)
    commit = _alone(costs, plan) if told is None else plan.predicted.commit_seconds
    # (every + 1) * (step + commit / every) = LITTLE_LOST
    rest = LITTLE_LOST - step - commit
    root = rest * rest - 4 * step * commit
    every = max(1, floor((rest + sqrt(root)) / (2 * step))) if rest > 0 <= root else 1
    again = with_interval(costs, plan, plan_schedule(model, plan), every)
    return timed_plan(model, hardware, again, chosen=False)


def with_longer_steps(model: ModelSpec, hardware: HardwareProfile, plan: Plan, step: float) -> Plan:
    """Returns the plan with the interval for steps of `step` seconds, where other ranks make them longer than its own."""
    if plan.commit_every in (None, 1) or step <= plan.plain_seconds:
        return plan
    costs, schedule = Costs.of(model, hardware, plan), plan_schedule(model, plan)
    every = least_interval(
        step=step,
        commit=max(plan.predicted.commit_seconds, _alone(costs, plan)),
        written=with_interval(costs, plan, schedule, None).predicted.written_per_step,
        resting=resting_in_ram(plan),
    )
    return timed_plan(model, hardware, with_interval(costs, plan, schedule, max(2, every)), chosen=False)


def least_interval(*, step: float, commit: float, written: int, resting: int) -> int:
    """Returns the fewest steps between commits within the limits. `step`: seconds of a step without a commit, 0 if no rate is
    known; `commit`: seconds that a commit adds; `written`: bytes that a step without a commit writes; `resting`: bytes that a
    commit adds."""
    if not resting:
        return 1
    in_time = commit * (1 - MOST_TIME) / (MOST_TIME * step) if step else 0.0
    in_writes = resting * (1 - MOST_WRITTEN) / (MOST_WRITTEN * written) if written else inf
    in_work = floor(MOST_LOST / step) if step else inf
    by_writes = min(in_writes, in_work)
    return max(1, ceil(in_time), ceil(by_writes) if by_writes < inf else 1)


def resting_in_ram(plan: Plan) -> int:
    """Returns the bytes that a commit writes on top of a normal step: weights and states whose home is not the ssd."""
    return sum(
        (not stage.writes_weights) * _size(stage.weights_at) + (stage.states != "ssd") * _states_size(stage)
        for stage in plan.stages
    )


def _states_size(stage: StagePlan) -> int:
    return sum(map(_size, (stage.remainder_at, stage.momentum_at, stage.variance_at)))


def _size(span: Span | None) -> int:
    return 0 if span is None else span.size


def _has_states_in_ram(plan: Plan) -> bool:
    return any(stage.states != "ssd" and stage.momentum_at.size for stage in plan.stages)


def guessed_interval(costs: Costs, plan: Plan, *, step: float) -> tuple[int, float]:
    """Estimates the interval and the seconds that a commit adds, in closed form, for a plan without commits."""
    if not _has_states_in_ram(plan):
        return 1, 0.0
    resting, commit = resting_in_ram(plan), _alone(costs, plan)
    return least_interval(step=step, commit=commit, written=plan.predicted.written_per_step, resting=resting), commit


def _alone(costs: Costs, plan: Plan) -> float:
    """Returns the seconds that a commit takes if nothing else happens; 0 if no rate is known."""
    rate = costs.hardware.store_write
    return resting_in_ram(plan) / rate if rate else 0.0


def with_interval(costs: Costs, plan: Plan, schedule: Schedule, every: int | None) -> Plan:
    """Returns the same plan with `every` steps between commits, and the traffic of an average step."""
    return with_commits(costs, plan, recommitted(costs.model, plan, schedule, every), every)


def with_commits(costs: Costs, plan: Plan, schedule: Schedule, every: int | None) -> Plan:
    """Returns the same plan with `every` steps between commits, which `schedule` has."""
    seconds = busy_seconds(costs, schedule, stages=plan.stages, device=plan.device)
    bottleneck = max(sorted(seconds), key=lambda name: seconds[name])
    predicted = replace(
        plan.predicted,
        read_per_step=schedule.traffic.read_total,
        written_per_step=schedule.traffic.written_total,
        read_by=schedule.traffic.read,
        written_by=schedule.traffic.written,
        seconds=seconds,
        step_seconds=seconds[bottleneck],
        bottleneck=bottleneck,
    )
    return replace(plan, commit_every=every, predicted=predicted)


def timed_plan(
    model: ModelSpec,
    hardware: HardwareProfile,
    plan: Plan,
    *,
    chosen: bool,
    step: Timeline | None = None,
    costs: Costs | None = None,
) -> Plan:
    """Returns the plan with simulated times: averages over the steps from one commit to the next. `chosen`: the planner chooses
    the interval now, from the time of a step. `step`: the simulated step of this plan, if it is known. `costs`: of the search
    that found it; they know much of its steps."""
    schedule, resting = plan_schedule(model, plan), resting_in_ram(plan)
    if costs is None or (costs.sweeps, costs.batch_on_device) != (plan.sweeps, plan.batch_on_device):
        costs = Costs.of(model, hardware, plan)
    if chosen and not _has_states_in_ram(plan):
        plan, chosen = with_interval(costs, plan, schedule, 1), False
    if not resting or (not chosen and plan.commit_every in (None, 1)):
        return _told(plan, step or _simulated(costs, plan, schedule), commit=0.0)
    plain, each = (None, step) if plan.commit_every == 1 else (step, None)
    plain = plain or _simulated(costs, replace(plan, commit_every=None), schedule)
    commit = _seconds_of_a_commit(costs, plan, schedule, plain)
    if not chosen:
        return _told(plan, plain, commit=commit)
    counted = max(commit, _alone(costs, plan))
    every = least_interval(step=plain.step_seconds, commit=counted, written=plain.written, resting=resting)
    if every == 1:
        plan = with_interval(costs, plan, schedule, 1)
        each = each or _simulated(costs, plan, schedule)
        if each.step_seconds * (1 - MOST_TIME) <= plain.step_seconds:
            return _told(plan, each, commit=0.0)
        every = 2  # what one commit leaves to be written slows the next one down
    return _told(with_interval(costs, plan, schedule, every), plain, commit=commit)


def _told(plan: Plan, step: Timeline, *, commit: float) -> Plan:
    each = commit / plan.commit_every if plan.commit_every else 0.0
    predicted = replace(
        plan.predicted,
        step_seconds=step.step_seconds + each,
        forward_seconds=step.forward_seconds,
        stalls={**step.stalls, COMMITS: each} if each > 0 else step.stalls,
        commit_seconds=commit,
    )
    return replace(plan, predicted=predicted)


def _simulated(costs: Costs, plan: Plan, schedule: Schedule, *, steps: int = STEPS, commits: bool = False) -> Timeline:
    return simulate(costs.model, costs.hardware, plan, schedule, costs=costs, steps=steps, commits=commits, jobs=False)


def _seconds_of_a_commit(costs: Costs, plan: Plan, schedule: Schedule, plain: Timeline) -> float:
    """Returns the seconds that one commit adds to its own step and the steps after it. `plain`: a step without a commit."""
    once = replace(plan, commit_every=STEPS + 1)
    after = _simulated(costs, once, schedule, steps=STEPS + _SETTLING, commits=True)
    return max(0.0, after.end - plain.end - _SETTLING * plain.step_seconds)
