"""Tests rates as a run turned out: a plan made with them says what the run did."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.planner.costs import Costs
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.search import fastest
from fuyou_cli.planner.simulate import simulate
from fuyou_cli.planner.timeline import Timeline
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.plan import Plan
from fuyou_cli.training.corrected import LEAST_STEPS, corrected
from fuyou_cli.training.report import Busy, RunReport, busy_seconds
from tests.step_reports import report_of_run, step_report

from .models import HARDWARE, SPEC, request
from .test_compared import collected

KNOWN = replace(HARDWARE, matmul_flops=2e8, shared_compute=0.6, shared_adamw=0.8)


@cache
def plan_of() -> Plan:
    return fastest(SPEC, KNOWN, request())


def step_on(machine: HardwareProfile, plan: Plan | None = None) -> Timeline:
    plan = plan or plan_of()
    return simulate(SPEC, machine, plan, plan_schedule(SPEC, plan))


def run_on(machine: HardwareProfile, *, steps: int = 2 + LEAST_STEPS, plan: Plan | None = None) -> RunReport:
    """Returns what a run of the plan reports where the machine is really like this."""
    plan = plan or plan_of()
    step = step_on(machine, plan)
    busy = busy_seconds([
        Busy(resource=name, label=done.what, begin=max(0.0, done.begin - step.begin), end=done.end - step.begin)
        for done in step.work for name, _ in done.parts
    ])  # fmt: skip
    costs = Costs.of(SPEC, machine, plan)
    reports = [
        step_report(
            number, total_steps=steps, seconds=step.step_seconds, read_bytes=step.read, written_bytes=step.written, busy=busy,
            update_cpu_seconds=sum(costs.update_seconds(stage) for stage in plan.stages), io_cpu_seconds=0.0,
        )
        for number in range(1, steps + 1)
    ]  # fmt: skip
    return report_of_run(collected(reports, settling=2), plan, flops_per_token=6.0)


def slower(times: float) -> HardwareProfile:
    return replace(KNOWN, matmul_flops=KNOWN.matmul_flops / times)


def test_a_run_as_planned_corrects_nothing() -> None:
    found = corrected(KNOWN, SPEC, plan_of(), step_on(KNOWN), run_on(KNOWN))
    assert found is not None
    assert found.adamw[0][1] == pytest.approx(KNOWN.adamw[0][1])
    assert found.store_read == pytest.approx(KNOWN.store_read, rel=1e-3)
    assert step_on(found).step_seconds == pytest.approx(step_on(KNOWN).step_seconds, rel=1e-3)


def test_threads_that_wait_for_the_memory_tell_nothing_of_adamw() -> None:
    """Their time doubles where others use the memory as well."""
    shared = replace(KNOWN, dram=1e8)
    run = run_on(shared)
    found = corrected(shared, SPEC, plan_of(), step_on(shared), replace(run, update_cpu=2 * run.update_cpu))
    assert found is not None and found.adamw == shared.adamw
    unlimited = corrected(KNOWN, SPEC, plan_of(), step_on(KNOWN), replace(run, update_cpu=2 * run.update_cpu))
    assert unlimited is not None and unlimited.adamw != shared.adamw


def test_launches_are_as_much_slower_as_compute() -> None:
    rate = KNOWN.stage_rate("block", SPEC.compute_dtype, SPEC.hidden_size, SPEC.stages[1].params, 1)
    known = replace(KNOWN, stage_rates=(replace(rate, tokens=1, forward_launch=0.001, backward_launch=0.003),))
    found = corrected(known, SPEC, plan_of(), step_on(known), run_on(slower(2.0)))
    assert found is not None
    (own,) = (each for each in found.stage_rates if each.kind == "block" and each.tokens > 1)
    times = rate.forward / own.forward
    assert times > 1.5 and (own.forward_launch, own.backward_launch) == pytest.approx((0.001 * times, 0.003 * times))


@examples(30)
@given(st.floats(0.6, 2.5), st.floats(0.5, 3.0))
def test_a_plan_made_again_says_what_the_run_did(compute: float, update: float) -> None:
    truth = replace(slower(compute), adamw=tuple((threads, rate / update) for threads, rate in KNOWN.adamw))
    found = corrected(KNOWN, SPEC, plan_of(), step_on(KNOWN), run_on(truth))
    assert found is not None
    before, after, real = (step_on(machine).step_seconds for machine in (KNOWN, found, truth))
    assert abs(after / real - 1) <= max(0.05, 0.5 * abs(before / real - 1))


def test_a_slower_drive_that_is_waited_for_is_seen() -> None:
    quick = replace(KNOWN, matmul_flops=1e12, adamw=((1, 1e11),))
    plan = fastest(SPEC, quick, request(weights="ssd", states="ssd"))
    truth = replace(quick, store_read=1e9, store_read_mixed=0.6e9, store_write=0.5e9, store_write_mixed=0.4e9)
    found = corrected(quick, SPEC, plan, step_on(quick, plan), run_on(truth, plan=plan))
    assert found is not None
    assert step_on(found, plan).step_seconds == pytest.approx(step_on(truth, plan).step_seconds, rel=0.1)
    assert found.stage_rates[0].forward == pytest.approx(quick.matmul_flops, rel=0.05)  # compute was as it was said to be


def test_what_shows_nothing_corrects_nothing() -> None:
    step = step_on(KNOWN)
    assert corrected(KNOWN, SPEC, plan_of(), step, run_on(KNOWN, steps=1 + LEAST_STEPS)) is None
    assert corrected(replace(KNOWN, measured="assumed"), SPEC, plan_of(), step, run_on(KNOWN)) is None
    assert corrected(KNOWN, SPEC, replace(plan_of(), device="emulated"), step, run_on(KNOWN)) is None
    wild = corrected(KNOWN, SPEC, plan_of(), step, run_on(slower(50)))  # something else went on
    assert wild is not None and wild.stage_rates[0].forward == KNOWN.matmul_flops
