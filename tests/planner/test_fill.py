"""Tests that what a device has left goes to whole stages or to outputs where that is faster, and is never passed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.core.units import GiB, MiB, align_up
from fuyou_cli.planner.bound import copied_bytes
from fuyou_cli.planner.boundary_layout import RECORD_ALIGN, device_bytes, device_layouts, every_operator
from fuyou_cli.planner.costs import Costs
from fuyou_cli.planner.fill import TURN, may_fill, stages_filling
from fuyou_cli.planner.memory import bytes_left, device_memory, most_needed, update_scratch
from fuyou_cli.planner.place import made_of, plan
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.search import Family, family, fastest, search
from fuyou_cli.planner.simulate import simulate
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan

from .models import HARDWARE, NUMERICS, SPEC, models, parts, request_for, with_graphs

CARD = replace(HARDWARE, device="cuda", device_memory=24 * GiB, matmul_flops=1e14, h2d=2e10, d2h=2e10, cores=8)
CPU_BUDGET = 2 * GiB


def _request(gpu_budget: int, *, clip: float | None = 1.0, **changes: object) -> PlanRequest:
    fields = dict(numerics=NUMERICS, model_name="test", device="cuda", clip_grad_norm=clip, cpu_budget=CPU_BUDGET)
    return PlanRequest(**{**fields, "gpu_budget": gpu_budget, "scratch_size": 8 * MiB, **changes})  # type: ignore[arg-type]


def _there(plan: Plan) -> set[int]:
    return {stage.stage for stage in plan.stages if stage.updated_on_device}


@pytest.mark.parametrize("clip", [1.0, None])
def test_a_small_model_on_a_large_card_moves_nothing(clip: float | None) -> None:
    """Moves nothing but the inputs that blocks keep for backward: weights, gradients and states stay, and no update runs on the
    host."""
    request = _request(8 * GiB, clip=clip, kept="none")
    plan = fastest(SPEC, CARD, request)
    assert _there(plan) == {stage.index for stage in SPEC.stages if stage.params}
    schedule = plan_schedule(SPEC, plan)
    up, down = copied_bytes(Costs.of(SPEC, CARD, plan), schedule.visits, stages=plan.stages)
    boundary = SPEC.boundary_bytes_per_token * NUMERICS.tokens
    assert plan.batch_on_device and up <= boundary * len(SPEC.stages) and down <= boundary * len(SPEC.stages)
    assert plan.predicted.seconds["update"] == plan.predicted.read_by["weights"] == plan.predicted.read_by["states"] == 0
    assert not any(slots.weight_slots or slots.gradient_slots for slots in plan.slot_classes)


def test_an_embeddings_gradients_wait_for_the_updates_before_them() -> None:
    """The device computes in order: an update of the lowest block runs before the embedding's backward, however short."""
    request = _request(8 * GiB, clip=None, defer=False, kept="none", weights="cpu", states="cpu", device_states=(1,))
    plan = made_of(SPEC, replace(CARD, matmul_flops=1e11), request, next(_candidates(request)))
    assert plan is not None and _there(plan) == {1}
    step = simulate(SPEC, replace(CARD, matmul_flops=1e11), plan, plan_schedule(SPEC, plan))
    (update,) = (done for done in step.work if (done.what, done.stage) == ("update", 1))
    (gradients,) = (done for done in step.work if (done.what, done.stage) == ("gradients", 0))
    assert step.begin < update.begin < update.end <= gradients.begin


SLOW_UPDATES = replace(CARD, matmul_flops=5e9, h2d=1e10, d2h=1e10, device_memory_rate=1e12)


def _room_for(count: int) -> PlanRequest:
    """Returns a request for a step that keeps no outputs, with device memory for so many resting stages."""
    request = _request(0, clip=None, kept="none", boundaries="cpu")
    least = most_needed(SPEC, replace(request, device_states=())).total + update_scratch(SPEC.stages[0].trained)
    return replace(request, gpu_budget=least + count * (SPEC.stages[0].weight_bytes + SPEC.stages[0].state_bytes) + MiB)


def test_the_first_stages_are_updated_on_the_device_where_compute_would_wait_for_them() -> None:
    """Every other update is hidden by the backward of the stages below it."""
    found = search(SPEC, SLOW_UPDATES, replace(_room_for(3), lookahead=3))
    assert {0, 1} == _there(found.best.plan)
    spread = [other for other in found.others if other.timeline is not None and other.candidate.there != TURN]
    assert spread and all(other.seconds > 1.05 * found.best.seconds for other in spread)


@pytest.mark.parametrize(("count", "expected"), [(0, ()), (1, (0,)), (2, (0, 1)), (3, (0, 1))])
def test_stages_at_the_turn_are_there_as_far_as_they_fit(count: int, expected: tuple[int, ...]) -> None:
    assert stages_filling(SPEC, _room_for(count), TURN) == expected


def test_boundaries_of_stages_on_the_device_rest_in_ram_like_others() -> None:
    """There is room for all. One stage computes and is updated on the device, but its input was left on the ssd."""
    request = replace(_room_for(1), boundaries=None, clip_grad_norm=1.0)
    plan = made_of(SPEC, CARD, replace(request, device_states=(2,)), next(iter(_candidates(request))))
    assert plan is not None and _there(plan) == {2}
    assert plan.predicted.written_by["boundaries"] == 0 and plan.stages[2].boundary_ram


@given(
    budget=st.integers(0, 200), clip=st.sampled_from([1.0, None]), defer=st.sampled_from([None, False, True]),
    share=st.sampled_from([TURN, 0.25, 0.5, 1.0]),
)  # fmt: skip
def test_the_device_is_never_passed(budget: int, clip: float | None, defer: bool | None, share: float) -> None:
    request = _request(budget * MiB, clip=clip, defer=None if clip else defer)
    chosen = stages_filling(SPEC, request, share)
    asked = replace(request, device_states=chosen)
    plan = made_of(SPEC, CARD, asked, next(iter(_candidates(asked))))
    if plan is None or not chosen:
        return
    assert _there(plan) == set(chosen)
    memory = device_memory(SPEC, replace(asked, batch_on_device=plan.batch_on_device), plan.stages)
    assert memory.total == plan.predicted.gpu_peak
    assert memory.total - (memory.batch if request.batch_on_device is None else 0) <= budget * MiB


def _candidates(request: PlanRequest):  # type: ignore[no-untyped-def]
    yield from iter(family(SPEC, request))


@pytest.mark.parametrize("clip", [1.0, pytest.param(None, marks=pytest.mark.slow)])
def test_more_memory_makes_no_step_slower(clip: float | None) -> None:
    """Compares up to what a search misses."""
    steps = list[float]()
    for megabytes in (90, 120, 160, 240, 1000):
        found = search(SPEC, CARD, _request(megabytes * MiB, clip=clip))
        assert found.best.plan.predicted.gpu_peak <= megabytes * MiB
        steps.append(found.best.seconds)
    assert all(later <= earlier * 1.05 for earlier, later in pairwise(steps)), steps
    assert steps[-1] < steps[0]


@pytest.mark.parametrize("fixed", [dict(states="cpu"), dict(weights="ssd"), dict(gradients="cpu"), dict(device="cpu")])
def test_what_the_recipe_says_stays_so(fixed: dict[str, object]) -> None:
    request = _request(8 * GiB, **fixed)
    assert not may_fill(SPEC, request)
    assert _there(fastest(SPEC, CARD, request)) == set()


# ---- outputs that stay there: as many as there is room for, charged to the byte, simulated as spared compute -------------

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


@examples(15)
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


def _with_room(**changes: object) -> PlanRequest:
    asked = PlanRequest(
        numerics=NUMERICS, model_name="test", device="cuda", clip_grad_norm=1.0, cpu_budget=1 << 40, boundaries="cpu",
    )  # fmt: skip
    return replace(asked, **changes)  # type: ignore[arg-type]


def test_what_stays_is_not_computed_again_and_does_not_cross() -> None:
    spec, room = SPEC, 1 << 40
    recomputed = plan(spec, QUICK, _with_room(gpu_budget=room))
    kept = plan(spec, QUICK, _with_room(gpu_budget=room, kept_there="room"))
    swapped = plan(spec, QUICK, _with_room(gpu_budget=room, kept="all"))
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
    none = replace(_with_room(), gpu_budget=None)
    without, room = search(SPEC, QUICK, none).best, search(SPEC, QUICK, _with_room(gpu_budget=1 << 40)).best
    assert room.candidate.kept_there == 1.0 and room.seconds < without.seconds
    assert not any(stage.kept_there for stage in without.plan.stages)
    on_cpu = search(SPEC, QUICK, _with_room(device="cpu", gpu_budget=1 << 40)).best
    assert not any(stage.kept_there for stage in on_cpu.plan.stages), "memory of device cpu is RAM"


def test_graphs_of_compiled_blocks_stay_on_the_device_or_nowhere() -> None:
    """As many as it has room for, each for all micro-batches. A search takes them where that is faster."""
    spec = with_graphs(SPEC, size=50_000)
    blocks = [stage.index for stage in spec.stages if stage.kind == "block"]
    nowhere, alone = (
        _with_room(gpu_budget=1 << 40, kept="all"),
        _with_room(gpu_budget=1 << 40, kept="none", kept_there="room"),
    )
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
    request = _with_room(gpu_budget=1 << 40, boundaries=None)
    found = search(spec, QUICK, request).best
    assert [stage.stage for stage in found.plan.stages if stage.kept_there] == blocks
    assert not any(stage.kept for stage in found.plan.stages)


def test_a_backward_that_measures_computes_a_graph_again() -> None:
    """The second one writes into what the graph saved."""
    spec = with_graphs(SPEC, size=1 << 16)
    placed = plan(spec, QUICK, _with_room(gpu_budget=1 << 40, kept_there="room", norm_first=True))
    backwards = [visit for visit in plan_schedule(spec, placed).visits if (visit.phase, visit.stage) == ("backward", 1)]
    forward = spec.stages[1].forward_flops * NUMERICS.micro_batches
    assert [(visit.measures, visit.flops / forward) for visit in backwards] == [(True, 3.0), (False, 2.0)]
