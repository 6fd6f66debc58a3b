"""The search beside brute force, what it never does (leave the budget, ignore a pin, depend on anything but its inputs), and
where it turns which knob."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
from drawn import crossed, every, examples
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.core.errors import PlanError
from fuyou_cli.core.units import GiB, MiB
from fuyou_cli.planner.place import Placing, least_memory
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.search import GAIN, MOST_PLACED, MOST_VISITS, Family, family, fastest, search, search_timed, timed
from fuyou_cli.planner.simulate import STEPS, Timeline, simulate
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec, OperatorSpec
from fuyou_cli.spec.plan import Plan

from .models import HARDWARE, NUMERICS, model, models, parts, request_for

SLOW_STORE = replace(HARDWARE, store_read=2e8, store_write=2e8, store_read_mixed=1.5e8, store_write_mixed=1.5e8)
MACHINES = st.sampled_from([HARDWARE, SLOW_STORE, replace(SLOW_STORE, matmul_flops=2e10, shared_compute=0.5, shared_adamw=0.5)])


IN_TOYS = 0.1  # of the step: of four to six stages each is much of the memory
COPYING = replace(SLOW_STORE, device="cuda", h2d=1e9, d2h=1e9, matmul_flops=5e11)


def _step(spec: ModelSpec, hardware: HardwareProfile, plan: Plan) -> float:
    return simulate(spec, hardware, plan, plan_schedule(spec, plan), jobs=False).step_seconds


@st.composite
def small(draw: st.DrawFn) -> tuple[ModelSpec, HardwareProfile, PlanRequest, Family]:
    """Between hardly fitting and all in RAM."""
    spec, hardware = draw(models(most=1 << 20)), draw(MACHINES)
    request = replace(draw(request_for(spec)), device="cpu", scratch_size=MiB)
    kept = draw(st.sampled_from([None, ((),) * len(spec.stages)]))
    request = replace(request, kept=kept, lookahead=draw(st.integers(1, 3)), states=request.states if kept else "ssd")
    least = least_memory(spec, hardware, request)
    request = replace(request, cpu_budget=least + draw(st.integers(0, 16)) * 4 * MiB)
    return spec, hardware, request, draw(parts(family(spec, request)))


@st.composite
def free(draw: st.DrawFn) -> tuple[ModelSpec, HardwareProfile, PlanRequest, Family]:
    """Draws a case with every knob left to the search, and a few values of each to look at."""
    spec, hardware = draw(models(unit=1 << 20, most=16 << 20, blocks=3)), draw(st.one_of(MACHINES, st.just(COPYING)))
    request = replace(
        draw(request_for(spec, pinned=False)), device="cuda" if hardware.h2d else "cpu", scratch_size=MiB, kept=None,
        lookahead=None, defer=None,
    )  # fmt: skip
    least = least_memory(spec, hardware, request)
    request = replace(request, cpu_budget=least + draw(st.integers(0, 100)) * 6 * MiB)
    return spec, hardware, request, draw(parts(family(spec, request)))


def _shortest(spec: ModelSpec, hardware: HardwareProfile, request: PlanRequest, candidates: Family) -> float:
    """Returns the seconds of the fastest candidate, of all."""
    placing = Placing(spec, hardware, request)
    placed = {id(found): found for found in map(placing.plan_of, candidates) if found is not None}
    seconds = float("inf")
    for found in sorted(placed.values(), key=lambda found: found.bound):
        if found.bound < seconds:
            seconds = min(seconds, _step(spec, hardware, found.plan) + found.commits)
    return seconds


@examples(20)
@given(free())
def test_hardly_anything_in_the_family_is_faster(case: tuple[ModelSpec, HardwareProfile, PlanRequest, Family]) -> None:
    """So neither more memory nor faster drives make a step much slower: a plan for less is one for more."""
    spec, hardware, request, candidates = case
    request = replace(request, norm_first=False)
    found = search(spec, hardware, request, candidates=candidates)
    assert found.best.seconds <= _shortest(spec, hardware, request, candidates) * (1 + IN_TOYS)


@pytest.mark.parametrize(("size", "rows"), [(24 * MiB, 2), (48 * MiB, 1)])
def test_outputs_that_cross_slower_than_they_are_computed_are_not_kept(size: int, rows: int) -> None:
    """Of so many blocks few candidates are simulated: which, the estimate says, and it counts copies to a device."""
    spec = model(8 << 20, *[16 << 20] * 40, 2048, 8 << 20)
    output = OperatorSpec(index=0, name="mm", flops=0.5 * spec.stages[1].forward_flops, bytes=size)
    blocks = tuple(replace(stage, operators=(output,) if stage.kind == "block" else ()) for stage in spec.stages)
    spec = replace(spec, stages=blocks)
    hardware = replace(HARDWARE, device="cuda", matmul_flops=100 * spec.stages[1].forward_flops, h2d=2e9, d2h=2e9)
    request = replace(_large(spec), device="cuda", clip_grad_norm=None, cpu_budget=1 << 40, gpu_budget=1 << 40)
    numerics = replace(request.numerics, micro_batch_size=rows, accumulate_dtype="float32")
    request = replace(request, numerics=numerics)
    recomputed = search(spec, hardware, replace(request, kept=((),) * len(spec.stages))).best
    assert search(spec, hardware, request).best.seconds <= recomputed.seconds * (1 + GAIN)


@crossed(
    2,
    hardware=[SLOW_STORE, replace(SLOW_STORE, matmul_flops=2e10, shared_compute=0.5, shared_adamw=0.5)],
    case=[(None, 90, 2), (1.0, 50, 6), (1.0, 300, 6)],
)
def test_where_tensors_are_large_little_is_lost(hardware: HardwareProfile, case: tuple[float | None, int, int]) -> None:
    """Beside all candidates: with `spare` MiB beyond the least, where what moves to RAM makes a difference."""
    clip, spare, blocks = case
    spec = model(8 << 20, *[16 << 20] * blocks, 2048, 8 << 20)
    request = replace(_large(spec), clip_grad_norm=clip, norm_first=False)
    request = replace(request, cpu_budget=least_memory(spec, hardware, request) + spare * MiB)
    candidates = replace(family(spec, request), swap=(0.0, 1.0), activations=(-1.0, 0.5, 1.0))
    assert search(spec, hardware, request).best.seconds <= _shortest(spec, hardware, request, candidates) * (1 + IN_TOYS)


@pytest.mark.parametrize(("clip", "blocks"), every(4, [(1.0, 400), (None, 400), (1.0, 126), (None, 126)]))
def test_a_search_does_so_much_and_no_more(blocks: int, clip: float | None) -> None:
    """As many blocks as the largest dense model published has, and more: what the time of a search depends on."""
    spec = model(64 << 20, *[64 << 20] * blocks, 2048, 64 << 20)
    request = replace(_large(spec), clip_grad_norm=clip)
    found = search(spec, SLOW_STORE, replace(request, cpu_budget=least_memory(spec, SLOW_STORE, request) + 8 * GiB))
    assert found.placed <= MOST_PLACED
    assert 0 < found.visits <= max(MOST_VISITS, 4 * STEPS * 2 * len(spec.stages))


def test_a_brief_search_finds_nearly_the_same() -> None:
    """It begins with the choice of a plan that has less RAM."""
    spec = model(64 << 20, *[64 << 20] * 120, 2048, 64 << 20)
    request = replace(_large(spec), clip_grad_norm=1.0)
    request = replace(request, cpu_budget=least_memory(spec, SLOW_STORE, request) + 8 * GiB)
    whole = search(spec, SLOW_STORE, request)
    near = search(spec, SLOW_STORE, replace(request, cpu_budget=request.cpu_budget - 4 * GiB)).best.candidate
    brief = search(spec, SLOW_STORE, request, near=near)
    assert brief.placed < whole.placed / 2 and brief.visits < whole.visits
    assert brief.best.seconds <= 1.02 * whole.best.seconds


def test_what_a_search_gives_up_is_free_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's cycle collector is off meanwhile; afterwards it is as it was."""
    collecting: list[bool] = []

    def looked_at(*args: Any, **options: Any) -> Timeline:
        collecting.append(gc.isenabled())
        return simulate(*args, **options)

    spec = model(8 << 20, *[16 << 20] * 4, 2048, 8 << 20)
    request = replace(_large(spec), clip_grad_norm=None)
    gc.collect()
    gc.disable()
    try:
        search(spec, SLOW_STORE, request)
        assert not gc.isenabled()
        assert gc.collect() < 100
    finally:
        gc.enable()
    monkeypatch.setattr("fuyou_cli.planner.search.simulate", looked_at)
    search(spec, SLOW_STORE, request)
    assert gc.isenabled() and collecting and not any(collecting)


def test_what_the_search_saw_is_what_the_plan_says() -> None:
    """A step is simulated the same way wherever its time is asked for."""
    spec = model(8 << 20, *[16 << 20] * 4, 2048, 8 << 20)
    request = replace(_large(spec), clip_grad_norm=None)
    found = search(spec, SLOW_STORE, request)
    assert timed(found.best, spec, SLOW_STORE, request).predicted.step_seconds == found.best.seconds
    assert _step(spec, SLOW_STORE, found.best.plan) == found.best.seconds


@examples(10)
@given(small())
def test_a_plan_stays_inside_what_it_was_given(case: tuple[ModelSpec, HardwareProfile, PlanRequest, Family]) -> None:
    spec, hardware, request, candidates = case
    plan, again = (
        timed(search(spec, hardware, request, candidates=candidates).best, spec, hardware, request) for _ in range(2)
    )
    assert plan.predicted.cpu_peak <= request.cpu_budget
    assert plan == again
    pins = (("weights", request.weights), ("states", request.states), ("boundary", request.boundaries))
    for stage, spec_stage in zip(plan.stages, spec.stages, strict=True):
        for kind, tier in pins:
            if tier is not None and (kind != "boundary" or spec_stage.kind in ("block", "norm")):
                assert getattr(stage, kind) == tier


def test_what_does_not_fit_says_what_would() -> None:
    spec = model(1 << 22, *[4 << 22] * 8, 2048, 1 << 22)
    request = _large(spec)
    least = least_memory(spec, SLOW_STORE, request)
    assert fastest(spec, SLOW_STORE, replace(request, cpu_budget=least)).predicted.cpu_peak <= least
    with pytest.raises(PlanError, match="does not fit"):
        search(spec, SLOW_STORE, replace(request, cpu_budget=least - 2 * MiB))


def test_a_choice_that_overflows_the_disk_is_left_where_another_fits() -> None:
    spec = model(1 << 22, *[4 << 22] * 8, 2048, 1 << 22)
    output = OperatorSpec(index=0, name="mm", flops=0.9 * spec.stages[1].forward_flops, bytes=64 * MiB)
    spec = replace(
        spec, stages=tuple(replace(stage, operators=(output,) if stage.kind == "block" else ()) for stage in spec.stages)
    )
    slow_compute = replace(HARDWARE, matmul_flops=1e8)
    request = replace(_large(spec), cpu_budget=least_memory(spec, slow_compute, _large(spec)) + 600 * MiB)
    swapped, plain = (search(spec, slow_compute, replace(request, kept=kept)).best.plan for kept in (None, "none"))
    least, most = plain.store_size, swapped.store_size
    assert most > least, "outputs on the ssd take room there, and are worth it"
    assumed = fastest(spec, replace(slow_compute, measured="assumed"), request)
    assert assumed.predicted.written_per_step < swapped.predicted.written_per_step
    assert not any(stage.kept and stage.boundary == "ssd" for stage in assumed.stages), "nobody measured what that is worth"
    tight = replace(slow_compute, disk_free=least)
    assert fastest(spec, tight, request).store_size <= least
    assert fastest(spec, replace(tight, disk_free=1), request).store_size >= least  # refused later, by name
    assert fastest(spec, slow_compute, replace(request, ssd_budget=least)).store_size <= least
    assert fastest(spec, replace(tight, disk_free=1), replace(request, ssd_budget=most)).store_size == most


def _large(spec: ModelSpec) -> PlanRequest:
    return PlanRequest(
        numerics=replace(NUMERICS, accumulate_dtype="bfloat16", max_seq_len=128),
        model_name="test", device="cpu", clip_grad_norm=1.0, cpu_budget=2 * GiB, scratch_size=MiB,
    )  # fmt: skip


def _blocks_with_activations(peak: int) -> ModelSpec:
    spec = model(1 << 20, *[1 << 22] * 6, 2048, 1 << 20)
    stages = tuple(replace(s, forward_peak=peak, backward_peak=peak) if s.kind == "block" else s for s in spec.stages)
    return replace(spec, stages=stages)


def test_room_is_left_for_free_pages_where_that_is_faster() -> None:
    """With rates at which page faults cost nothing, RAM goes to tensors instead; with none left, the run is planned without."""
    spec = _blocks_with_activations(64 * MiB)
    free = _large(spec)
    least = least_memory(spec, HARDWARE, free)
    some = replace(free, cpu_budget=least + 120 * MiB)
    slow = replace(HARDWARE, host_copy=1e9, host_fresh=1e8)
    free_faults = replace(HARDWARE, host_copy=1e15, host_fresh=1e15, matmul_flops=1e15)
    for hardware, roomy in ((slow, True), (free_faults, False)):
        found, plan = search_timed(spec, hardware, some)
        assert (plan.free_pages, found.best.candidate.free_pages) == (roomy, roomy)
        ways = [search(spec, hardware, replace(some, free_pages=way)).best.seconds for way in (True, False)]
        assert plan.predicted.step_seconds == pytest.approx(min(ways))
    assert not search_timed(spec, slow, replace(free, cpu_budget=least))[1].free_pages
