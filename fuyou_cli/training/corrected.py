"""Corrects the rates of a machine by a run on it, for later plans that ask for them.

A rate is corrected by what the plan said beside what was measured of one step: compute by the seconds in which some of it was
under way, updates by the CPU time of their threads, a drive by its seconds, and only where it was busy for most of the step:
other drives show how they were used, not how fast they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..planner.costs import Costs
from ..planner.schedule import plan_schedule
from ..planner.simulate import simulate
from ..planner.timeline import Timeline
from ..spec.hardware import HardwareProfile, RatedKind, StageRate, merged_rates
from ..spec.model import ModelSpec
from ..spec.plan import Plan
from .report import RunReport

LEAST_STEPS = 2  # after the first ones of a run, which are not like the rest
FULL = 0.8  # of a step: from here on a drive is what is waited for
BELIEVED = (0.2, 5.0)  # a rate so many times what was known is another thing than a correction


def corrected(
    hardware: HardwareProfile, model: ModelSpec, plan: Plan, step: Timeline, report: RunReport
) -> HardwareProfile | None:
    """Returns the plan's profile with the rates that the run shows. None where it shows nothing: too short, planned with
    assumed rates, or on an emulated device. `step` is the plan's, simulated."""
    if report.settled < LEAST_STEPS or hardware.measured == "assumed" or plan.device == "emulated":
        return None
    costs = Costs.of(model, hardware, plan)
    # Seconds of all update threads together: beside others each is slower than one alone.
    alone = sum(costs.update_seconds(stage) for stage in plan.stages)
    update = _factor(alone * plan.io.update_threads / costs.updates_at_once, report.update_cpu)
    read, write = (
        _factor(step.under_way.get(direction, 0.0), report.busy.get(direction, 0.0))
        if report.busy.get(direction, 0.0) >= FULL * report.step_seconds and not plan.sustained  # begun at other rates
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
    # Updates and transfers slow down compute that shares the cores with them: how much, is known with their own rates right.
    again = simulate(model, found, plan, plan_schedule(model, plan))
    compute = _factor(again.under_way.get("compute", 0.0), report.busy.get("compute", 0.0))
    return replace(found, stage_rates=merged_rates(found.stage_rates, tuple(_stage_rates(found, model, plan, compute))))


def _factor(predicted: float, measured: float) -> float:
    """Returns what to multiply a rate by: more than 1 where less time was taken."""
    if predicted <= 0 or measured <= 0:
        return 1.0
    lowest, highest = BELIEVED
    factor = predicted / measured
    return factor if lowest <= factor <= highest else 1.0


def _stage_rates(hardware: HardwareProfile, model: ModelSpec, plan: Plan, factor: float) -> Iterable[StageRate]:
    """Yields the rates of every kind of stage in the model, at its own shape."""
    tokens = plan.numerics.micro_batch_size * plan.numerics.max_seq_len
    for stage in model.stages:
        if stage.kind not in ("block", "head"):
            continue
        kind: RatedKind = "head" if stage.kind == "head" else "block"
        params = model.stages[model.owner(stage.index)].params
        rate = hardware.stage_rate(kind, model.compute_dtype, model.hidden_size, params, tokens)
        yield StageRate(
            kind=kind, dtype=model.compute_dtype, hidden=model.hidden_size, params=params, tokens=tokens,
            forward=rate.forward * factor, backward=rate.backward * factor, given=rate.given * factor,
        )  # fmt: skip
