"""Tests drives that slow down: a run that writes past their fast region is planned with what they sustain, others are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.core.units import MiB
from fuyou_cli.planner.place import Placing, least_memory
from fuyou_cli.planner.place import plan as first_that_fits
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.search import RunPlanner, family, fast_region, fastest, least_written
from fuyou_cli.planner.simulate import simulate
from fuyou_cli.spec.model import ModelSpec

from .models import HARDWARE, NUMERICS, model, models, parts, request_for

SPEC = model(1 << 22, *[4 << 22] * 8, 2048, 1 << 22)
WISHES = PlanRequest(
    numerics=replace(NUMERICS, accumulate_dtype="bfloat16", max_seq_len=128),
    model_name="test", device="cpu", clip_grad_norm=None, cpu_budget=0, scratch_size=MiB,
)  # fmt: skip
WISHES = replace(WISHES, cpu_budget=least_memory(SPEC, HARDWARE, WISHES) + 100 * MiB)
SLOWING = replace(
    HARDWARE, sustained_write=2e8, sustained_read_mixed=1e9, sustained_write_mixed=1e8, burst_bytes=10**10
)  # a tenth and an eighth of what it writes at first


@examples(25)
@given(st.data())
def test_no_plan_writes_less_than_the_bound(data: st.DataObject) -> None:
    """Draws models so large, and a process so small, that the bound is above zero in most cases."""
    spec, small = data.draw(models(unit=1 << 20, most=16 << 20)), replace(HARDWARE, process_bytes=0)
    request = replace(data.draw(request_for(spec)), device="cpu")
    request = replace(request, cpu_budget=least_memory(spec, small, request) + data.draw(st.integers(0, 16)) * 4 * MiB)
    placing, least = Placing(spec, small, request), least_written(spec, request)
    for candidate in data.draw(parts(family(spec, request))):
        found = placing.plan_of(candidate)
        assert found is None or found.plan.predicted.written_per_step >= least


def test_a_plan_for_later_rates_is_the_plan_of_a_machine_that_has_no_others() -> None:
    always = replace(
        SLOWING, store_write=SLOWING.sustained_write, store_read_mixed=SLOWING.sustained_read_mixed,
        store_write_mixed=SLOWING.sustained_write_mixed,
    )  # fmt: skip
    asked = replace(WISHES, sustained=True)
    assert fastest(SPEC, SLOWING, asked) == fastest(SPEC, always, asked)
    assert replace(fastest(SPEC, SLOWING, asked), sustained=False) == fastest(SPEC, always, WISHES)


@pytest.mark.parametrize(
    "machine",
    [HARDWARE, replace(HARDWARE, burst_bytes=1), replace(HARDWARE, sustained_write=HARDWARE.store_write)],
    ids=["not measured", "nothing known but a size", "does not slow down"],
)
def test_where_nothing_slows_down_there_is_one_plan(machine: object) -> None:
    plan = RunPlanner(machine, effort="fit").plan(SPEC, WISHES, steps=10**9).plan  # type: ignore[arg-type]
    assert plan == first_that_fits(SPEC, HARDWARE, WISHES)
    assert fast_region(SPEC, machine, plan) is None  # type: ignore[arg-type]


def test_a_region_of_unknown_size_is_not_counted_on() -> None:
    unknown = replace(SLOWING, burst_bytes=0)
    plan = RunPlanner(unknown, effort="fit").plan(SPEC, WISHES, steps=1).plan
    assert plan.sustained
    region = fast_region(SPEC, unknown, plan)
    assert region is not None and (region.size, region.steps) == (0, 0.0)


def test_both_are_told() -> None:
    plan = RunPlanner(SLOWING).plan(SPEC, WISHES, steps=1000).plan
    region = fast_region(SPEC, SLOWING, plan)
    assert region is not None and region.size == 10**10
    assert region.steps == 10**10 / plan.predicted.written_per_step
    assert region.later == plan.predicted.step_seconds > region.first == _seconds(SPEC, plan)
    assert region.seconds(1) == region.first
    whole = int(region.steps)
    assert region.seconds(whole) == pytest.approx(whole * region.first)
    assert region.seconds(whole + 11) - region.seconds(whole + 1) == pytest.approx(10 * region.later)


def _seconds(spec: ModelSpec, plan: object) -> float:
    """Returns the seconds of this very plan at the first rates."""
    fresh = replace(plan, sustained=False)  # type: ignore[type-var]
    return simulate(spec, SLOWING, fresh, plan_schedule(spec, fresh)).step_seconds  # type: ignore[arg-type]
