"""The search beside brute force, and what it never does: leave the budget, ignore a pin, depend on anything but its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuyou_cli.core.errors import PlanError
from fuyou_cli.core.units import GiB, MiB
from fuyou_cli.planner.assemble import assemble
from fuyou_cli.planner.choice import family
from fuyou_cli.planner.memory import Homes
from fuyou_cli.planner.place import least_memory, made_of
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.search import fastest, search
from fuyou_cli.planner.simulate import simulate
from fuyou_cli.planner.wishes import Wishes
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec, OperatorSpec
from fuyou_cli.spec.plan import Numerics, Plan

from .models import HARDWARE, model, models, wishes_for

TIE = 2e-3  # of the step: the search prefers the cheaper of two about as fast
SLOW_STORE = replace(HARDWARE, store_read=2e8, store_write=2e8, store_read_mixed=1.5e8, store_write_mixed=1.5e8)
MACHINES = st.sampled_from([HARDWARE, SLOW_STORE, replace(SLOW_STORE, matmul_flops=2e10, shared_compute=0.5, shared_adamw=0.5)])


def _step(spec: ModelSpec, hardware: HardwareProfile, plan: Plan) -> float:
    return simulate(spec, hardware, plan, plan_schedule(spec, plan), steps=2).step_seconds


@st.composite
def small(draw: st.DrawFn) -> tuple[ModelSpec, HardwareProfile, Wishes]:
    """Between hardly fitting and all in RAM."""
    spec, hardware = draw(models(most=1 << 20)), draw(MACHINES)
    wishes = replace(draw(wishes_for(spec)), device="cpu", scratch_size=MiB)
    kept = draw(st.sampled_from([None, ((),) * len(spec.stages)]))
    wishes = replace(wishes, kept=kept, lookahead=draw(st.integers(1, 3)), states=wishes.states if kept else "ssd")
    least = least_memory(spec, hardware, wishes)
    return spec, hardware, replace(wishes, cpu_budget=least + draw(st.integers(0, 16)) * 4 * MiB)


@settings(max_examples=4, deadline=None)
@given(small())
def test_nothing_in_the_family_is_faster(case: tuple[ModelSpec, HardwareProfile, Wishes]) -> None:
    spec, hardware, wishes = case
    found = search(spec, hardware, wishes, exhaustive=True)
    plans = (made_of(spec, hardware, wishes, choice) for choice in family(spec, wishes))
    seconds = [_step(spec, hardware, plan) for plan in plans if plan is not None]
    assert found.complete
    assert found.best.seconds <= min(seconds) * (1 + TIE)


@pytest.mark.parametrize("hardware", [SLOW_STORE, replace(SLOW_STORE, matmul_flops=2e10, shared_compute=0.5, shared_adamw=0.5)])
@pytest.mark.parametrize(("clip", "spare"), [(None, 50), (None, 600), (1.0, 300)])
def test_climbing_loses_little(hardware: HardwareProfile, clip: float | None, spare: int) -> None:
    spec = model(8 << 20, *[16 << 20] * 6, 2048, 8 << 20)
    wishes = replace(_large(spec), clip_grad_norm=clip, kept=((),) * 9)
    wishes = replace(wishes, cpu_budget=least_memory(spec, hardware, wishes) + spare * MiB)
    best = search(spec, hardware, wishes, exhaustive=True).best.seconds
    assert search(spec, hardware, wishes, exhaustive=False).best.seconds <= best * 1.03


@settings(max_examples=12, deadline=None)
@given(small())
def test_a_plan_stays_inside_what_it_was_given(case: tuple[ModelSpec, HardwareProfile, Wishes]) -> None:
    spec, hardware, wishes = case
    plan = fastest(spec, hardware, wishes)
    assert plan.predicted.cpu_peak <= wishes.cpu_budget
    assert plan == fastest(spec, hardware, wishes)
    pins = (("weights", wishes.weights), ("states", wishes.states), ("boundary", wishes.boundaries))
    for stage, spec_stage in zip(plan.stages, spec.stages, strict=True):
        for kind, tier in pins:
            if tier is not None and (kind != "boundary" or spec_stage.kind in ("block", "norm")):
                assert getattr(stage, kind) == tier


@pytest.mark.parametrize("spare", [0, 150, 400, 900])
def test_every_placement_of_a_small_model(spare: int) -> None:
    """All homes that fit, not only those that a choice leads to: none is more than a little faster. `spare` MiB."""
    spec = model(16 << 20, 16 << 20, 16 << 20, 2048, 16 << 20)
    wishes = Wishes(
        numerics=Numerics(
            compute_dtype="bfloat16", accumulate_dtype="bfloat16", batch_size=2, micro_batch_size=2, max_seq_len=2048,
            head_chunk_tokens=0, torch_threads=2, seed=0,
        ),
        model_name="test", device="cpu", clip_grad_norm=None, cpu_budget=0, lookahead=1, defer=0.0, scratch_size=MiB,
        kept=((),) * 5,
    )  # fmt: skip
    wishes = replace(wishes, cpu_budget=least_memory(spec, SLOW_STORE, wishes) + spare * MiB)
    everything = [_step(spec, SLOW_STORE, plan) for plan in _everywhere(spec, SLOW_STORE, wishes)]
    assert len(everything) > 1 or not spare
    assert search(spec, SLOW_STORE, wishes).best.seconds <= min(everything, default=float("inf")) * 1.02


def _everywhere(spec: ModelSpec, hardware: HardwareProfile, wishes: Wishes) -> Iterator[Plan]:
    """The norm, which hardly takes anything, stays where it is."""
    tiers = ("ssd", "cpu")
    for weights, states, boundaries in product(product(tiers, repeat=4), product(tiers, repeat=4), product(tiers, repeat=2)):
        homes = Homes(
            weights=(*weights[:3], "ssd", weights[3]), states=(*states[:3], "ssd", states[3]), gradients=("cpu",) * 5,
            boundaries=("cpu", *boundaries, "ssd", "cpu"), kept=((),) * 5,
        )  # type: ignore[arg-type] # fmt: skip
        plan = assemble(spec, hardware, wishes, homes, lookahead=1, gradient_slots=2)
        if plan.predicted.cpu_peak <= wishes.cpu_budget:
            yield plan


def test_deferral_is_found_where_it_helps() -> None:
    """Bound by the store: forward has little for it to do, backward nearly all."""
    spec = model(1 << 22, *[4 << 22] * 8, 2048, 1 << 22)
    wishes = replace(_large(spec), clip_grad_norm=None, states="ssd", weights="ssd")
    found = search(spec, SLOW_STORE, wishes)
    assert found.best.choice.defer > 0
    at_once = [other for other in found.others if other.choice == replace(found.best.choice, defer=0.0)]
    assert all(other.seconds > found.best.seconds for other in at_once)


def test_what_does_not_fit_says_what_would() -> None:
    spec = model(1 << 22, *[4 << 22] * 8, 2048, 1 << 22)
    wishes = _large(spec)
    least = least_memory(spec, SLOW_STORE, wishes)
    assert fastest(spec, SLOW_STORE, replace(wishes, cpu_budget=least)).predicted.cpu_peak <= least
    with pytest.raises(PlanError, match="does not fit"):
        fastest(spec, SLOW_STORE, replace(wishes, cpu_budget=least - 2 * MiB))


def test_a_choice_that_overflows_the_disk_is_left_where_another_fits() -> None:
    spec = model(1 << 22, *[4 << 22] * 8, 2048, 1 << 22)
    output = OperatorSpec(index=0, name="mm", flops=0.9 * spec.stages[1].forward_flops, bytes=64 * MiB)
    spec = replace(
        spec, stages=tuple(replace(stage, operators=(output,) if stage.kind == "block" else ()) for stage in spec.stages)
    )
    slow_compute = replace(HARDWARE, matmul_flops=1e8)
    wishes = replace(_large(spec), cpu_budget=least_memory(spec, slow_compute, _large(spec)) + 600 * MiB)
    everything = search(spec, slow_compute, wishes)
    sizes = {found.plan.store_size for found in (everything.best, *everything.others)}
    assert everything.best.plan.store_size > min(sizes), "outputs on the ssd take room there, and are worth it"
    assumed = fastest(spec, replace(slow_compute, measured="assumed"), wishes)
    assert assumed.predicted.written_per_step < everything.best.plan.predicted.written_per_step
    assert not any(stage.kept and stage.boundary == "ssd" for stage in assumed.stages), "nobody measured what that is worth"
    tight = replace(slow_compute, disk_free=min(sizes))
    assert fastest(spec, tight, wishes).store_size == min(sizes)
    assert fastest(spec, replace(tight, disk_free=1), wishes).store_size in sizes  # refused later, by name
    allowed = replace(wishes, ssd_budget=min(sizes))
    assert fastest(spec, slow_compute, allowed).store_size == min(sizes)
    assert fastest(spec, replace(tight, disk_free=1), replace(wishes, ssd_budget=max(sizes))).store_size == max(sizes)


def _large(spec: ModelSpec) -> Wishes:
    return Wishes(
        numerics=Numerics(
            compute_dtype="bfloat16", accumulate_dtype="bfloat16", batch_size=4, micro_batch_size=2, max_seq_len=128,
            head_chunk_tokens=0, torch_threads=2, seed=0,
        ),
        model_name="test", device="cpu", clip_grad_norm=1.0, cpu_budget=2 * GiB, scratch_size=MiB,
    )  # fmt: skip
