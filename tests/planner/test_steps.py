"""Tests what a report keeps of a run's steps: typical ones, in memory that does not grow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuyou_cli.planner.place import plan as first_that_fits
from fuyou_cli.training.report import LATEST, Busy, RunReport, StepReport, Steps, settling_steps
from tests.step_reports import report_of_run

from .models import HARDWARE, SPEC, request
from .test_compared import collected, step

PLAN = first_that_fits(SPEC, HARDWARE, request())


def report_of(steps: Steps) -> RunReport:
    return report_of_run(steps, PLAN)


def taking(*seconds: float, first: int = 1) -> list[StepReport]:
    return [step(number, seconds=each) for number, each in enumerate(seconds, start=first)]


def test_the_first_steps_are_left_out() -> None:
    report = report_of(collected(taking(50.0, 40.0, 2.0, 4.0, 3.0), settling=2))
    assert (report.steps, report.settled, report.step_seconds) == (5, 3, 3.0)
    assert report.tokens_per_second == pytest.approx(16 * 3 / 9)


@pytest.mark.parametrize(("seconds", "typical"), [((50.0, 40.0), 40.0), ((50.0,), 50.0), ((), 0.0)])
def test_of_a_short_run_what_there_is(seconds: tuple[float, ...], typical: float) -> None:
    report = report_of(collected(taking(*seconds), settling=2))
    assert (report.steps, report.settled, report.step_seconds) == (len(seconds), 0, typical)


def test_a_long_run_keeps_the_latest_and_totals_of_all() -> None:
    steps = Steps(settling=1)
    drawn = (Busy(resource="compute", label="forward", begin=0.0, end=1.0),)
    for number in range(1, LATEST + 502):
        old = number <= LATEST // 2
        steps.add(replace(step(number, seconds=9.0 if old else 1.0, stalls={"a slot": 0.5}), timeline=drawn))
    assert len(steps.typical) == LATEST and not any(kept.timeline for kept in steps.typical)
    report = report_of(steps)
    assert (report.steps, report.settled) == (LATEST + 501, LATEST + 500)
    assert report.stalls == {"a slot": pytest.approx(0.5 * (LATEST + 501))}
    assert report.timeline == drawn
    assert report.step_seconds == 1.0
    assert report.tokens_per_second == pytest.approx(16.0)


@pytest.mark.parametrize(("clip", "resumed", "settling"), [(None, False, 2), (1.0, False, 3), (1.0, True, 1), (None, True, 1)])
def test_how_many_steps_settle(clip: float | None, resumed: bool, settling: int) -> None:
    plan = first_that_fits(SPEC, HARDWARE, request(clip_grad_norm=clip))
    assert settling_steps(plan, resumed=resumed) == settling
