"""Corrects the rates of a machine by a run on it, for later plans that ask for them.

Each rate is corrected by the ratio of the plan's time to the measured time of one step. Compute counts the seconds in which
some of it was under way. Updates count the CPU time of their threads, unless the host's memory is busy for most of the step:
then these threads wait for it, and their time tells nothing of AdamW. A drive counts its seconds, but only if it was busy for
most of the step. Other drives show how much they were used, not how fast they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..planner.costs import Costs
from ..planner.schedule import plan_schedule
from ..planner.simulate import simulate
from ..planner.timeline import Timeline
from ..spec.hardware import HardwareProfile, StageRate, merged_rates, rated_kind
from ..spec.model import ModelSpec
from ..spec.plan import Plan
from .report import RunReport

LEAST_STEPS = 2  # after the first steps of a run, which differ from the rest
FULL = 0.8  # share of a step; a drive that is busy longer limits the step
SHARED = 0.5  # share of a step; where the host's memory is busy longer, AdamW often waits for it
BELIEVED = (0.2, 5.0)  # a measured rate outside these multiples of the known one is an error, not a correction


def corrected(
    hardware: HardwareProfile, model: ModelSpec, plan: Plan, step: Timeline, report: RunReport
) -> HardwareProfile | None:
    """Returns the plan's profile with the rates that the run shows. Returns None if it shows nothing: it is too short, was
    planned with assumed rates, or ran on an emulated device. `step` is the plan's step, simulated."""
    if report.settled < LEAST_STEPS or hardware.measured == "assumed" or plan.device == "emulated":
        return None
    costs = Costs.of(model, hardware, plan)
    # Seconds of all update threads together. Each is slower beside others than alone.
    alone = sum(costs.update_seconds(stage) for stage in plan.stages)
    update = _factor(alone * plan.io.update_threads / costs.updates_at_once, report.update_cpu)
    update = update if step.in_use.get("dram", 0.0) < SHARED * step.step_seconds else 1.0
    read, write = (
        _factor(step.under_way.get(direction, 0.0), report.busy.get(direction, 0.0))
        if report.busy.get(direction, 0.0) >= FULL * report.step_seconds and not plan.sustained  # the run began at other rates
        else 1.0
        for direction in ("ssd read", "ssd write")
    )
    found = replace(
        hardware,
        adamw=tuple((threads, rate * update) for threads, rate in hardware.adamw),
        store_read=hardware.store_read * read,
        store_read_mixed=hardware.store_read_mixed * read,
        store_write=hardware.store_write * write,
        store_write_mixed=hardware.store_write_mixed * write,
    )
    # Updates and transfers slow down compute on the same cores. Their corrected rates tell how much.
    again = simulate(model, found, plan, plan_schedule(model, plan))
    compute = _factor(again.under_way.get("compute", 0.0), report.busy.get("compute", 0.0))
    return replace(found, stage_rates=merged_rates(found.stage_rates, tuple(_stage_rates(found, model, plan, compute))))


def _factor(predicted: float, measured: float) -> float:
    """Returns the factor for a rate: more than 1 if the run took less time than predicted."""
    if predicted <= 0 or measured <= 0:
        return 1.0
    lowest, highest = BELIEVED
    factor = predicted / measured
    return factor if lowest <= factor <= highest else 1.0


def _stage_rates(hardware: HardwareProfile, model: ModelSpec, plan: Plan, factor: float) -> Iterable[StageRate]:
    """Yields the rates of every kind of stage in the model, at the stage's own shape."""
    tokens, costs = plan.numerics.micro_batch_size * plan.numerics.max_seq_len, Costs.of(model, hardware, plan)
    for stage in model.stages:
        if stage.kind not in ("block", "head"):
            continue
        kind = rated_kind(model, stage)
        params = model.stages[model.owner(stage.index)].params
        rate = costs.rate(stage)
        yield StageRate(
            kind=kind, dtype=model.compute_dtype, hidden=model.hidden_size, params=params, tokens=tokens,
            forward=rate.forward * factor, backward=rate.backward * factor, given=rate.given * factor,
            graph=rate.graph * tokens // rate.tokens if rate.graph else 0, forward_launch=rate.forward_launch / factor,
            backward_launch=rate.backward_launch / factor,
            expert_rows=0.0 if stage.expert_work is None else stage.expert_work.rows,
        )  # fmt: skip
