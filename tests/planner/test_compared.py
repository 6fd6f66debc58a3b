"""Tests what a report keeps of a run's steps (typical ones, in memory that does not grow), and its lines: every resource and
every cause of waiting, predicted beside measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.planner.commit_interval import timed_plan
from fuyou_cli.planner.costs import Costs
from fuyou_cli.planner.place import plan as first_that_fits
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.simulate import Timeline, simulate
from fuyou_cli.spec.plan import Plan
from fuyou_cli.training.length import written_by_step
from fuyou_cli.training.report import (
    LATEST,
    Busy,
    Compared,
    StepReport,
    Steps,
    busy_seconds,
    compared,
    settling_steps,
    through_memory,
)
from tests.step_reports import report_of_run, step_report

from .models import HARDWARE, SPEC, request


@pytest.fixture
def promised() -> tuple[Plan, Timeline]:
    plan = first_that_fits(SPEC, HARDWARE, request(clip_grad_norm=1.0))
    return plan, simulate(SPEC, HARDWARE, plan, plan_schedule(SPEC, plan))


def step(number: int, **measured: Any) -> StepReport:
    return step_report(number, **{"total_steps": 4, "tokens": 10, "batch_tokens": 16, **measured})


def collected(reports: Iterable[StepReport], *, settling: int = 1) -> Steps:
    steps = Steps(settling=settling)
    for report in reports:
        steps.add(report)
    return steps


def lines(promised: tuple[Plan, Timeline], *steps: StepReport) -> dict[str, Compared]:
    report = report_of_run(collected(steps), promised[0], seconds=9.0, ram_peak=1 << 29, written_total=200)
    return {line.what: line for line in compared(report, *promised)}


def test_medians_of_the_later_steps_stand_beside_the_plan(promised: tuple[Plan, Timeline]) -> None:
    plan, timeline = promised
    found = lines(
        promised,
        step(1, busy={"compute": 99.0, "ssd read": 99.0}, stalls={"weights of the head": 50.0}),  # warms up
        step(2, busy={"compute": 1.0, "ssd read": 0.5}, stalls={"weights of the head": 0.25}, written_bytes=40),
        step(3, busy={"compute": 3.0, "ssd read": 0.7}, written_bytes=60),
        step(4, busy={"compute": 2.0}, stalls={"weights of the head": 0.75}, written_bytes=50),
    )
    compute = found["compute under way"]
    assert (compute.predicted, compute.measured, compute.unit) == (timeline.under_way["compute"], 2.0, "seconds")
    assert compute.difference == pytest.approx(2.0 / timeline.under_way["compute"] - 1)
    assert found["ssd read under way"].measured == 0.5  # of a step in which nothing was read, none
    assert "h2d under way" not in found  # nobody measured it
    assert (found["ssd written"].predicted, found["ssd written"].measured) == (plan.predicted.written_per_step, 50)
    assert found["peak RAM"].predicted == plan.predicted.cpu_peak
    assert found["  for weights of the head"].measured == found["waiting"].measured == 0.25


def test_where_commits_are_steps_apart_both_sides_are_averages(promised: tuple[Plan, Timeline]) -> None:
    """Averages over whole intervals."""
    plan = first_that_fits(SPEC, HARDWARE, request(clip_grad_norm=None, states="cpu", commit_every=3, defer=False))
    plan = timed_plan(SPEC, HARDWARE, plan, chosen=False)
    assert plan.plain_seconds < plan.predicted.step_seconds and plan.predicted.written_per_step > written_by_step(plan)
    steps = [
        step(number, seconds=5.0 if number % 3 == 0 else 2.0, written_bytes=90 * (number % 3 == 0)) for number in range(1, 9)
    ]
    found = lines((plan, promised[1]), *steps)
    assert (found["step"].predicted, found["step"].measured) == (plan.predicted.step_seconds, 3.0)
    assert (found["ssd written"].predicted, found["ssd written"].measured) == (plan.predicted.written_per_step, 30)


@examples(20)
@given(disk=st.floats(0.001, 1.0), clip=st.sampled_from([None, 1.0]))
def test_a_run_just_as_planned_differs_in_nothing(disk: float, clip: float | None) -> None:
    """Differs in nothing also where a resource is held back by another: an update that waits for a slow disk is under way all
    the while."""
    rates = ("store_read", "store_read_mixed", "store_write", "store_write_mixed")
    slow = replace(HARDWARE, **{name: disk * getattr(HARDWARE, name) for name in rates})
    plan = first_that_fits(SPEC, slow, request(clip_grad_norm=clip, states="ssd"))
    timeline = simulate(SPEC, slow, plan, plan_schedule(SPEC, plan))
    measured = busy_seconds([
        Busy(resource=name, label=done.what, begin=max(0.0, done.begin - timeline.begin), end=done.end - timeline.begin)
        for done in timeline.work for name, _ in done.parts
    ])  # fmt: skip
    found = lines((plan, timeline), step(1), step(2, busy=measured, stalls=timeline.stalls, seconds=timeline.step_seconds))
    for name in ("compute", "update", "ssd read", "ssd write"):
        line = found[f"{name} under way"]
        assert line.measured == pytest.approx(line.predicted) and line.measured > 0, name
    assert found["update under way"].predicted > timeline.in_use["update"]  # AdamW alone is far quicker than its disk
    assert all(seconds <= timeline.step_seconds * (1 + 1e-9) for seconds in timeline.under_way.values())


def test_memory_of_a_device_stands_beside_the_plan_where_it_has_its_own(promised: tuple[Plan, Timeline]) -> None:
    plan, timeline = promised
    plan = replace(plan, predicted=replace(plan.predicted, gpu_peak=3 << 30))
    report = report_of_run(collected([step(1), step(2)]), plan, seconds=9.0, ram_peak=1 << 29, written_total=200)
    (line,) = (line for line in compared(report, plan, timeline, gpu_peak=2 << 30) if line.what == "peak GPU memory")
    assert (line.unit, line.predicted, line.measured) == ("bytes", 3 << 30, 2 << 30)
    assert "peak GPU memory" not in {line.what for line in compared(report, plan, timeline)}


def test_the_hosts_memory_stands_beside_the_plan_where_its_bandwidth_is_known() -> None:
    """A run that moves what was planned has the plan's bytes; more reads are more bytes."""
    hardware = replace(HARDWARE, dram=1e8)
    plan = first_that_fits(SPEC, hardware, request(device="cuda", clip_grad_norm=1.0))
    timeline = simulate(SPEC, hardware, plan, plan_schedule(SPEC, plan))
    more = int(2 * hardware.dram)
    for extra in (0, more):
        steps = [step(number, read_bytes=timeline.read + extra, written_bytes=timeline.written) for number in (1, 2)]
        report = report_of_run(collected(steps), plan, seconds=9.0)
        memory = hardware.dram, through_memory(report, Costs.of(SPEC, hardware, plan), plan)
        (line,) = (line for line in compared(report, plan, timeline, memory=memory) if line.what.startswith("through"))
        assert line.unit == "bytes" and line.predicted == timeline.in_use["dram"] * hardware.dram > 0
        assert line.measured == pytest.approx(line.predicted + extra, rel=1e-6)
    assert through_memory(report, Costs.of(SPEC, HARDWARE, plan), plan) == 0.0


def test_what_was_not_predicted_has_no_share(promised: tuple[Plan, Timeline]) -> None:
    timeline = promised[1]
    found = lines(promised, step(1), step(2, stalls={"a comet": 1.0}))
    assert found["  for a comet"].difference is None and found["  for a comet"].predicted == 0.0
    assert sum(timeline.stalls.values()) == found["waiting"].predicted
    comet = found["  for a comet"].as_data()
    assert comet == {"what": "for a comet", "unit": "seconds", "predicted": 0.0, "measured": 1.0, "difference": None}
    same = Compared(what="x", unit="bytes", predicted=0.0, measured=0.0)
    assert same.difference == 0.0


# ---- typical steps -----------------------------------------------------------------------------------------------------

PLAN = first_that_fits(SPEC, HARDWARE, request())


def taking(*seconds: float, first: int = 1) -> list[StepReport]:
    return [step(number, seconds=each) for number, each in enumerate(seconds, start=first)]


def test_the_first_steps_are_left_out() -> None:
    report = report_of_run(collected(taking(50.0, 40.0, 2.0, 4.0, 3.0), settling=2), PLAN)
    assert (report.steps, report.settled, report.step_seconds) == (5, 3, 3.0)
    assert report.tokens_per_second == pytest.approx(16 * 3 / 9)


@pytest.mark.parametrize(("seconds", "typical"), [((50.0, 40.0), 40.0), ((50.0,), 50.0), ((), 0.0)])
def test_of_a_short_run_what_there_is(seconds: tuple[float, ...], typical: float) -> None:
    report = report_of_run(collected(taking(*seconds), settling=2), PLAN)
    assert (report.steps, report.settled, report.step_seconds) == (len(seconds), 0, typical)


def test_a_long_run_keeps_the_latest_and_totals_of_all() -> None:
    steps = Steps(settling=1)
    drawn = (Busy(resource="compute", label="forward", begin=0.0, end=1.0),)
    for number in range(1, LATEST + 502):
        old = number <= LATEST // 2
        steps.add(replace(step(number, seconds=9.0 if old else 1.0, stalls={"a slot": 0.5}), timeline=drawn))
    assert len(steps.typical) == LATEST and not any(kept.timeline for kept in steps.typical)
    report = report_of_run(steps, PLAN)
    assert (report.steps, report.settled) == (LATEST + 501, LATEST + 500)
    assert report.stalls == {"a slot": pytest.approx(0.5 * (LATEST + 501))}
    assert report.timeline == drawn
    assert report.step_seconds == 1.0
    assert report.tokens_per_second == pytest.approx(16.0)


@pytest.mark.parametrize(("clip", "resumed", "settling"), [(None, False, 2), (1.0, False, 3), (1.0, True, 1), (None, True, 1)])
def test_how_many_steps_settle(clip: float | None, resumed: bool, settling: int) -> None:
    plan = first_that_fits(SPEC, HARDWARE, request(clip_grad_norm=clip))
    assert settling_steps(plan, resumed=resumed) == settling
