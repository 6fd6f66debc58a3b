"""Tests outputs that stay in a device's memory: as many as it has room for, charged to the byte, and simulated as spared
compute."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.core.units import align_up
from fuyou_cli.planner.boundary_layout import RECORD_ALIGN, device_bytes, device_layouts, every_operator
from fuyou_cli.planner.candidate import Family, family
from fuyou_cli.planner.memory import bytes_left, device_memory
from fuyou_cli.planner.place import plan
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.search import search
from fuyou_cli.planner.simulate import simulate
from fuyou_cli.spec.model import ModelSpec

from .models import HARDWARE, NUMERICS, SPEC, models, parts, request_for, with_graphs

# Copies that hide nothing and drives that are not in the way: compute is what a step takes.
QUICK = replace(HARDWARE, store_read=1e12, store_write=1e12, store_read_mixed=1e12, store_write_mixed=1e12, h2d=1e12, d2h=1e12)


@st.composite
def requests(draw: st.DrawFn) -> tuple[ModelSpec, PlanRequest, Family]:
    spec = draw(models(blocks=6))
    asked = replace(draw(request_for(spec)), device=draw(st.sampled_from(["cuda", "emulated"])), gpu_budget=1 << 40)
    least = (1 << 40) - bytes_left(spec, asked)
    every = device_bytes(spec, asked.numerics, every_operator(spec))
    asked = replace(asked, gpu_budget=least + int(draw(st.floats(0, 1.5)) * every))
    return spec, asked, draw(parts(family(spec, asked)))


@examples(30)
@given(case=requests())
def test_no_plan_takes_more_than_the_device_has(case: tuple[ModelSpec, PlanRequest, Family]) -> None:
    """Checks what a search finds and what a recipe asks for; an output is in one place."""
    spec, asked, candidates = case
    found = search(spec, HARDWARE, asked, candidates=candidates).best.plan
    for placed in (found, plan(spec, HARDWARE, replace(asked, kept="none", kept_there="room"))):
        assert asked.gpu_budget is not None and placed.predicted.gpu_peak <= asked.gpu_budget
        assert all(not set(stage.kept) & set(stage.kept_there) for stage in placed.stages)
        memory = device_memory(spec, asked, placed.stages)
        lines = {line.what: line.size for line in placed.memory if line.tier == "gpu"}
        assert lines.get("kept outputs", 0) == memory.outputs


def test_spans_are_apart_and_aligned() -> None:
    spec, numerics = SPEC, replace(NUMERICS, batch_size=5, micro_batch_size=2)
    every = every_operator(spec)
    taken = [
        (begin + span.offset, begin + span.offset + span.size)
        for (begin, layout), kept in zip(device_layouts(spec, numerics, every), every, strict=True)
        for micro_batch in range(3)
        for span in (layout.output(micro_batch, operator) for operator in kept)
    ]
    assert taken and all(begin % 512 == 0 for begin, _ in taken)
    taken.sort()
    assert all(end <= begin for (_, end), (begin, _) in pairwise(taken))
    assert taken[-1][1] <= device_bytes(spec, numerics, every)


def _asked(**changes: object) -> PlanRequest:
    asked = PlanRequest(
        numerics=NUMERICS, model_name="test", device="cuda", clip_grad_norm=1.0, cpu_budget=1 << 40, boundaries="cpu",
    )  # fmt: skip
    return replace(asked, **changes)  # type: ignore[arg-type]


def test_what_stays_is_not_computed_again_and_does_not_cross() -> None:
    spec, room = SPEC, 1 << 40
    recomputed = plan(spec, QUICK, _asked(gpu_budget=room))
    kept = plan(spec, QUICK, _asked(gpu_budget=room, kept_there="room"))
    swapped = plan(spec, QUICK, _asked(gpu_budget=room, kept="all"))
    assert [stage.kept_there for stage in kept.stages] == list(every_operator(spec))
    flops = [sum(visit.flops for visit in plan_schedule(spec, one).visits) for one in (recomputed, kept, swapped)]
    assert flops[0] > flops[1] == flops[2]
    for way in ("h2d", "d2h"):
        assert kept.predicted.seconds[way] == recomputed.predicted.seconds[way] < swapped.predicted.seconds[way]
    sizes = [sum(s.boundary_ram.size for s in one.stages if s.boundary_ram) for one in (recomputed, kept, swapped)]
    assert sizes[0] == sizes[1] < sizes[2]
    seconds = [simulate(spec, QUICK, one, plan_schedule(spec, one)).step_seconds for one in (recomputed, kept)]
    compute = [one.predicted.seconds["compute"] for one in (recomputed, kept)]
    assert seconds[0] - seconds[1] == pytest.approx(compute[0] - compute[1], rel=0.05)


def test_the_search_takes_them_where_compute_is_what_a_step_takes() -> None:
    """Leaves nothing else worse for them: without room on the device it is the plan that it was."""
    none = replace(_asked(), gpu_budget=None)
    without, room = search(SPEC, QUICK, none).best, search(SPEC, QUICK, _asked(gpu_budget=1 << 40)).best
    assert room.candidate.kept_there == 1.0 and room.seconds < without.seconds
    assert not any(stage.kept_there for stage in without.plan.stages)
    on_cpu = search(SPEC, QUICK, _asked(device="cpu", gpu_budget=1 << 40)).best
    assert not any(stage.kept_there for stage in on_cpu.plan.stages), "memory of device cpu is RAM"


def test_graphs_of_compiled_blocks_stay_on_the_device_or_nowhere() -> None:
    """As many as it has room for, each for all micro-batches. A search takes them where that is faster."""
    spec = with_graphs(SPEC, size=50_000)
    blocks = [stage.index for stage in spec.stages if stage.kind == "block"]
    nowhere, alone = _asked(gpu_budget=1 << 40, kept="all"), _asked(gpu_budget=1 << 40, kept="none", kept_there="room")
    assert not any(stage.given for stage in plan(spec, QUICK, nowhere).stages)
    least, each = (1 << 40) - bytes_left(spec, alone), NUMERICS.micro_batches * align_up(50_000, RECORD_ALIGN)
    for count in range(len(blocks) + 1):
        budget = least + each * count + each // 2
        placed = plan(spec, QUICK, replace(alone, gpu_budget=budget))
        assert placed.predicted.gpu_peak <= budget
        assert sum(len(stage.kept_there) for stage in placed.stages) == count
        assert [line.size for line in placed.memory if line.what == "kept graphs"] == [each * count] * (count > 0)
        (policy,) = {line.policy.partition(",")[0] for line in placed.memory if line.what == "boundaries"}
        assert policy == ("beside kept graphs" if count == len(blocks) else "recompute the rest")
    unknown = replace(spec, stages=tuple(replace(stage, operators=()) for stage in spec.stages))  # how large a graph is
    lines = plan(unknown, QUICK, alone).memory
    assert {line.policy.partition(",")[0] for line in lines if line.what == "boundaries"} == {"recompute the rest"}
    request = _asked(gpu_budget=1 << 40, boundaries=None)
    found = search(spec, QUICK, request).best
    assert [stage.stage for stage in found.plan.stages if stage.kept_there] == blocks
    assert not any(stage.kept for stage in found.plan.stages)


def test_a_backward_that_measures_computes_a_graph_again() -> None:
    """The second one writes into what the graph saved."""
    spec = with_graphs(SPEC, size=1 << 16)
    placed = plan(spec, QUICK, _asked(gpu_budget=1 << 40, kept_there="room", norm_first=True))
    backwards = [visit for visit in plan_schedule(spec, placed).visits if (visit.phase, visit.stage) == ("backward", 1)]
    forward = spec.stages[1].forward_flops * NUMERICS.micro_batches
    assert [(visit.measures, visit.flops / forward) for visit in backwards] == [(True, 3.0), (False, 2.0)]
