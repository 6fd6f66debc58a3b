"""Tests how a run is planned as a whole: a candidate that is placed gives the plan that a search found it with; the few banks
of an adapter rest in RAM if they are little, on the ssd where that is faster or fits alone."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.core.errors import PlanError
from fuyou_cli.core.units import MiB, parse_size
from fuyou_cli.planner.place import least_memory, plan
from fuyou_cli.planner.plan_request import WORTH_WRITING, PlanRequest, least_budget_to_rest, rest_in_ram, ways_to_rest
from fuyou_cli.planner.search import RunPlanner
from fuyou_cli.spec.model import ModelSpec, banks_of
from fuyou_cli.spec.plan import Plan

from .models import HARDWARE, NEAR, NUMERICS, SPEC, model, request


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


def test_every_deal_of_stages_is_searched_for_itself() -> None:
    """Though what ranks ask for is the same."""
    planner, asked, count = RunPlanner(HARDWARE), request(sweeps=1), len(SPEC.stages)
    for owners in ((0,) * (count - 2) + (1, 1), (0, 1) + (0,) * (count - 2)):
        view = SPEC.of_rank(owners, 0)
        assert planner.plan(view, asked, steps=0).plan == RunPlanner(HARDWARE).plan(view, asked, steps=0).plan


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


# ---- where the banks of an adapter rest ------------------------------------------------------------------------------


def adapted(blocks: int, frozen: int, trained: int) -> ModelSpec:
    """Makes a model whose blocks have so many million frozen parameters each, and an adapter."""
    spec = model(1 << 20, *[frozen << 20] * blocks, 2048, 1 << 20)

    def of(index: int) -> object:
        stage = spec.stages[index]
        (whole,) = stage.tensors if stage.tensors else (None,)
        if whole is None:
            return stage
        learned = trained << 20 if stage.kind == "block" else 0
        tensors = [replace(whole, name=f"{index}.a", shape=(learned,), numel=learned)] if learned else []
        tensors.append(replace(whole, offset=learned, frozen=True))
        banks = banks_of("bfloat16", trained=learned, frozen=whole.numel)
        return replace(stage, tensors=tuple(tensors), banks=banks)

    return replace(spec, stages=tuple(map(of, range(len(spec.stages)))))


def asked(budget: int) -> PlanRequest:
    return PlanRequest(
        numerics=NUMERICS, model_name="test", device="cpu", clip_grad_norm=1.0, cpu_budget=budget, scratch_size=MiB
    )  # fmt: skip


def made(spec: ModelSpec, request: PlanRequest) -> Plan | None:
    try:
        return RunPlanner(HARDWARE, effort="fit").plan(spec, request, steps=0).plan
    except PlanError:
        return None


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 8), st.integers(1, 900))
def test_the_need_that_is_named_fits_and_nothing_less(blocks: int, frozen: int, trained: int, budget: int) -> None:
    """Whatever budget it is named for: whether adapters rest in RAM depends on the budget too."""
    spec = adapted(blocks, frozen, trained)
    least = least_memory(spec, HARDWARE, asked(budget * MiB))
    assert made(spec, asked(least)) is not None and made(spec, asked(least - 1)) is None
    if budget * MiB >= least:
        return
    with pytest.raises(PlanError) as refused:
        plan(spec, HARDWARE, asked(budget * MiB))
    named = re.search(r"at least (\S+ \w+) of RAM, but offload.max_memory.cpu is (\S+ \w+)", refused.value.message)
    assert named is not None and parse_size(named[2]) == budget * MiB
    assert least <= parse_size(named[1]) <= 1.01 * least + MiB and made(spec, asked(parse_size(named[1]))) is not None


@examples(4)
@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 6), st.lists(st.integers(0, 400), min_size=1, max_size=3))
def test_more_memory_never_makes_a_step_slower(blocks: int, frozen: int, trained: int, spare: list[int]) -> None:
    """Looks on both sides of the budget from which on adapters may rest in RAM, with a drive that is slow to bring what they
    displace there."""
    spec = adapted(blocks, frozen, trained)
    slow = replace(HARDWARE, store_read=2e7, store_write=1e7, store_read_mixed=1e7, store_write_mixed=1e7)
    request = replace(asked(0), numerics=replace(NUMERICS, batch_size=64))
    least = least_memory(spec, slow, request)
    edge = least_budget_to_rest(spec, request)
    assert edge is not None
    budgets = sorted({least, max(least, edge - 1), max(least, edge), *(least + more * MiB // 4 for more in spare)})
    requests = [replace(request, cpu_budget=budget) for budget in budgets]
    steps = [RunPlanner(slow).plan(spec, each, steps=0).plan.predicted.step_seconds for each in requests]
    for number, step in enumerate(steps[1:], 1):
        assert step <= min(steps[:number]) * (1 + WORTH_WRITING) * (1 + NEAR), list(zip(budgets, steps, strict=True))


def test_little_rests_in_ram_and_is_compared_with_the_ssd_unless_it_is_very_little() -> None:
    spec = adapted(4, 8, 1)
    touched = 4 * (2 + 2 + 4 + 4 + 4) * MiB  # weights with their remainder, gradients, two moments
    for budget, ways in ((8 * touched - 1, [None]), (8 * touched, [True, False]), (64 * touched, [True])):
        request = asked(budget)
        assert [way.trained_in_ram for way in ways_to_rest(spec, request)] == ways
        assert rest_in_ram(spec, request) == (ways != [None])
    assert not rest_in_ram(spec, replace(asked(1 << 40), states="ssd", trained_in_ram=True))  # as the recipe says
