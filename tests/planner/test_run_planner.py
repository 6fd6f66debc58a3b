"""Tests how a run is planned as a whole: a candidate that is placed gives the plan that a search found it with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fuyou_cli.core.errors import PlanError
from fuyou_cli.core.units import MiB
from fuyou_cli.planner.place import least_memory
from fuyou_cli.planner.run_planner import RunPlanner

from .models import HARDWARE, SPEC, request
from .test_small_banks import adapted


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clip_grad_norm": 1.0},
        {"device": "emulated"},
        {"device": "emulated", "weights": "gpu"},
        {"boundaries": "cpu", "lookahead": 3},
        {"kept": "all"},
        {"commit_every": "auto"},
        {"commit_every": "auto", "states": "cpu"},
    ],
    ids=str,
)
def test_the_candidate_that_a_search_found_gives_its_plan(changes: dict[str, Any]) -> None:
    asked = request(**changes)
    made = RunPlanner(HARDWARE).plan(SPEC, asked, steps=0)
    assert made.search is not None
    again = RunPlanner(HARDWARE, candidate=made.search.best.candidate).plan(SPEC, asked, steps=0)
    assert again.search is None and again.request == made.request
    assert again.plan == made.plan


def test_a_candidate_rests_where_it_saves_time() -> None:
    """An adapter beside frozen weights may rest in RAM or on the ssd: both are placed."""
    spec = adapted(4, 8, 1)
    asked = request(clip_grad_norm=1.0)
    asked = replace(asked, cpu_budget=least_memory(spec, HARDWARE, asked) + 400 * MiB)
    made = RunPlanner(HARDWARE).plan(spec, asked, steps=0)
    assert made.search is not None
    again = RunPlanner(HARDWARE, candidate=made.search.best.candidate).plan(spec, asked, steps=0)
    assert again.plan == made.plan and again.request.trained_in_ram == made.request.trained_in_ram


def test_a_candidate_that_does_not_fit_is_refused() -> None:
    made = RunPlanner(HARDWARE).plan(SPEC, request(), steps=0)
    assert made.search is not None
    small = replace(request(), cpu_budget=least_memory(SPEC, HARDWARE, request()) // 2)
    with pytest.raises(PlanError, match="does not fit any more"):
        RunPlanner(HARDWARE, candidate=made.search.best.candidate).plan(SPEC, small, steps=0)


def test_where_nothing_fits_the_least_is_planned_if_that_is_wanted() -> None:
    least = least_memory(SPEC, HARDWARE, request())
    small = replace(request(), cpu_budget=least - 1)
    with pytest.raises(PlanError, match="does not fit"):
        RunPlanner(HARDWARE).plan(SPEC, small, steps=0)
    plan = RunPlanner(HARDWARE, or_least=True).plan(SPEC, small, steps=0).plan
    assert plan.cpu_budget == least - 1 < plan.predicted.cpu_peak <= least
