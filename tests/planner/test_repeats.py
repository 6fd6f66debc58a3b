"""Tests that visits that begin as earlier ones did are not simulated again: that changes no bit of a step."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.core.units import MiB
from fuyou_cli.planner.candidate import Candidate
from fuyou_cli.planner.costs import Costs
from fuyou_cli.planner.imagined import Imagined
from fuyou_cli.planner.place import least_memory, made_of
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.simulate import STEPS, simulate
from fuyou_cli.planner.timeline import Timeline
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan

from .models import HARDWARE, NUMERICS, cut, model, request_for

SLOW = replace(HARDWARE, store_read=2e8, store_write=2e8, store_read_mixed=1.5e8, store_write_mixed=1.2e8)
SHARED = replace(SLOW, matmul_flops=2e10, shared_compute=0.5, shared_adamw=0.5, io_cpu=1e-10)
COPYING = replace(SLOW, device="cuda", h2d=1e9, d2h=1e9, h2d_mixed=0.7e9, d2h_mixed=0.6e9, matmul_flops=5e11)
SHARES = st.fixed_dictionaries({
    "defer": st.booleans(), "states": st.sampled_from([0.0, 0.5]),
    "activations": st.sampled_from([-1.0, 0.0, 0.5]), "kept_there": st.sampled_from([0.0, 0.5]),
    "there": st.sampled_from([0.0, 0.0, 0.5]),
})  # fmt: skip
SUMS = [field.name for field in fields(Timeline) if field.name not in ("work", "asked")]


@st.composite
def planned(draw: st.DrawFn) -> tuple[ModelSpec, HardwareProfile, list[Plan]]:
    """Enough blocks for something to come again, with room in RAM and on the device for a part of what they need; two plans of
    one run, as a search places them."""
    unit = 1 << draw(st.sampled_from([17, 20]))
    sizes = [draw(st.integers(1, 5)) * unit, *[2 * unit] * draw(st.integers(12, 18)), 2048, draw(st.integers(1, 5)) * unit]
    spec = model(*sizes, tied=draw(st.booleans()))
    if draw(st.booleans()):
        spec = cut(spec, unit, unit)
    copies = draw(st.sampled_from([1e8, 1e9, 2e10]))
    copying = replace(COPYING, h2d=copies, d2h=copies, h2d_mixed=0.7 * copies, d2h_mixed=0.6 * copies)
    copying = replace(copying, dram=draw(st.sampled_from([0.0, 1.5 * copies])))
    hardware = draw(st.sampled_from([HARDWARE, SLOW, SHARED, copying, copying]))
    request = draw(request_for(spec, swept=True, most=3))
    request = replace(
        request, device="cuda" if hardware.h2d else "cpu", commit_every=draw(st.sampled_from([None, 1, 2, 4])), kept=None,
        gpu_budget=draw(st.sampled_from([None, 64 * MiB, 256 * MiB])) if hardware.h2d else None, states=None, lookahead=None,
    )  # fmt: skip
    request = replace(request, cpu_budget=least_memory(spec, hardware, request) + draw(st.integers(0, 60)) * 4 * MiB)
    pipeline = {"lookahead": draw(st.integers(1, 4)), "gradient_slots": draw(st.integers(1, 3))}
    made = [made_of(spec, hardware, request, Candidate(**pipeline, **draw(SHARES))) for _ in range(2)]
    found = [plan for plan in made if plan is not None]
    return (spec, hardware, found) if found else draw(planned())


@examples(10)
@given(planned(), st.booleans(), st.sampled_from([None, 1, 2, 4]))
def test_a_step_takes_the_same_to_the_last_bit(
    case: tuple[ModelSpec, HardwareProfile, list[Plan]], commits: bool, other: int | None
) -> None:
    spec, hardware, plans = case
    costs, steps = Costs.of(spec, hardware, plans[0]), STEPS + 2
    plans = [replace(plan, commit_every=every) for plan in plans for every in dict.fromkeys((plan.commit_every, other))]
    schedules = [plan_schedule(spec, plan) for plan in plans]
    wholes = [
        simulate(spec, hardware, plan, schedule, commits=commits, steps=steps)
        for plan, schedule in zip(plans, schedules, strict=True)
    ]
    for number in (*range(len(plans)), 0):  # the last one has seen every scene
        plan, schedule, whole = plans[number], schedules[number], wholes[number]
        again = simulate(spec, hardware, plan, schedule, commits=commits, steps=steps, costs=costs, jobs=False)
        assert {name: getattr(again, name) for name in SUMS} == {name: getattr(whole, name) for name in SUMS}
        assert (again.work, again.asked) == ((), ())


@pytest.mark.parametrize("hardware", [SLOW, COPYING], ids=["cpu", "cuda"])
def test_of_many_equal_blocks_few_are_simulated(hardware: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, simulated = model(1 << 20, *[1 << 20] * 100, 2048, 1 << 20), list[int]()
    device = "cuda" if hardware.h2d else "cpu"
    request = PlanRequest(numerics=NUMERICS, model_name="t", device=device, clip_grad_norm=1.0, cpu_budget=0, scratch_size=MiB)
    request = replace(request, cpu_budget=least_memory(spec, hardware, request) + 64 * MiB)
    plan = made_of(spec, hardware, request, Candidate(lookahead=2, gradient_slots=2))
    assert plan is not None
    visit = Imagined.visit
    monkeypatch.setattr(Imagined, "visit", lambda run: simulated.append(1) or visit(run))
    simulate(spec, hardware, plan, plan_schedule(spec, plan), jobs=False)
    assert 0 < len(simulated) < 0.25 * 3 * len(plan_schedule(spec, plan).visits)
