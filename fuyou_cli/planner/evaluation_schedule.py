"""Lists an evaluation as visits, forward through all stages and the logits of the head or its pieces, and simulates it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..spec.hardware import HardwareProfile
from ..spec.model import ModelSpec
from ..spec.plan import Plan
from .schedule import Pass, Schedule, Traffic, Visit, fetched_bytes
from .simulate import simulate

_PASSES = 2  # simulated; the first begins with empty slots


def evaluation_schedule(model: ModelSpec, plan: Plan) -> Schedule:
    """Returns one pass over the model, for as many rows as one sweep of a step. Nothing is kept for backward, no gradient is
    summed. An update that waits for the next forward runs before the first visit of its stage here, as it would in a step."""
    own_stages = [stage.index for stage in model.stages if not stage.away]
    visits = tuple(_visit(model, plan, index, stage) for index, stage in enumerate(own_stages))
    owners = (visit.owner for visit in visits if visit.fetch and visit.owner is not None)
    read = sum(fetched_bytes(model, plan.stages[owner]) for owner in owners)
    return Schedule(visits=visits, traffic=Traffic(read={"weights": read}, written={}))


def _visit(model: ModelSpec, plan: Plan, index: int, stage: int) -> Visit:
    owner, is_head = model.owner(stage), model.stages[stage].kind == "head"
    phase: Pass = "logits" if is_head else "forward"
    streamed = plan.stages[owner].weights == "ssd" and model.stages[owner].params > 0
    looks_up = model.stages[stage].kind == "embedding"
    waits = _stays_for_head(model, plan, owner)
    return Visit(
        index=index, phase=phase, stage=stage, owner=owner,
        fetch=streamed and not (waits and is_head), keep=streamed and waits and not is_head,
        update="before" if plan.stages[owner].deferred and not (is_head and owner != stage) else "none",
        stash=False, take=False, sum_gradients=False, rest=False, resume=False,
        flops=0.0 if looks_up else model.stages[stage].forward_flops * plan.group.micro_batches,
    )  # fmt: skip


def _stays_for_head(model: ModelSpec, plan: Plan, owner: int) -> bool:
    """Whether a tied embedding stays in its slot until the head: where no other stage needs a slot of that class."""
    if not model.tied_head or model.head_is_cut or owner != 0:
        return False
    number = plan.stages[owner].slot_class
    others = (stage.stage for stage in plan.stages if stage.slot_class == number and stage.stage != owner)
    return not any(plan.stages[stage].weights == "ssd" and model.stages[stage].params for stage in others)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationCost:
    """Says what evaluations take. `rows` and what follows from it: None where the sets are not tokenised yet."""

    pass_rows: int
    pass_seconds: float
    pass_read: int  # bytes of the store
    times: int | None  # evaluations left in the run; None if its length is not known
    rows: int | None = None  # of all sets
    passes: int | None = None  # of one evaluation
    seconds: float | None = None  # of one evaluation
    run_share: float | None = None  # of the time of all steps left and evaluations


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingCost:
    """Says what continuing fixed prompts takes at one evaluation."""

    prompts: int
    passes: int  # over the weights, at most: one for each new token
    seconds: float


def sampling_cost(
    model: ModelSpec, hardware: HardwareProfile, plan: Plan, *, prompts: int, at_once: int, tokens: int, new: int
) -> SamplingCost:
    """Prices `new` tokens after each prompt, `at_once` of them in a pass. `tokens`: of a row of a pass, about the mean."""
    at_once, alone = min(prompts, at_once), _alone(plan)
    schedule, share = evaluation_schedule(model, alone), at_once * tokens / plan.group.tokens
    shorter = replace(schedule, visits=tuple(replace(visit, flops=share * visit.flops) for visit in schedule.visits))
    seconds = simulate(model, hardware, alone, shorter, steps=_PASSES, jobs=False).step_seconds
    passes = new * -(-prompts // at_once)
    return SamplingCost(prompts=prompts, passes=passes, seconds=passes * seconds)


def _alone(plan: Plan) -> Plan:
    """Returns the plan without updates, which steps pay."""
    return replace(plan, stages=tuple(replace(stage, deferred=False) for stage in plan.stages))


def evaluation_cost(
    model: ModelSpec,
    hardware: HardwareProfile,
    plan: Plan,
    *,
    rows: Sequence[int] | None,
    times: int | None,
    run_seconds: float | None,
) -> EvaluationCost:
    """Prices evaluations of sets of so many `rows` each. `run_seconds`: of the steps left."""
    alone = _alone(plan)
    simulated = simulate(model, hardware, alone, evaluation_schedule(model, alone), steps=_PASSES, jobs=False)
    at_once, seconds = plan.group.batch_size, simulated.step_seconds
    cost = EvaluationCost(pass_rows=at_once, pass_seconds=seconds, pass_read=simulated.read, times=times)
    if rows is None:
        return cost
    passes = sum(-(-count // at_once) for count in rows)
    share = None
    if times is not None and run_seconds is not None and (whole := run_seconds + times * passes * seconds) > 0:
        share = times * passes * seconds / whole
    return replace(cost, rows=sum(rows), passes=passes, seconds=passes * seconds, run_share=share)


def evaluations_left(every: int | None, *, at_start: bool, total: int, done: int | None) -> int:
    """Counts the evaluations of a run from step `done` on (None: a new run): at its start, every so many steps, at its end."""
    begun = done or 0
    regular = 0 if every is None else total // every - begun // every
    at_end = begun < total and (every is None or total % every != 0)
    return regular + at_end + (at_start and done is None)
