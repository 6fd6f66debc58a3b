"""Micro-batches that cross to a device and back, on paper: compute hides all of a visit's copies but the first upload and the
last download, as in a run."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from fuyou_cli.planner.boundary_layout import kept_bytes
from fuyou_cli.planner.costs import Costs
from fuyou_cli.planner.device import crossing
from fuyou_cli.planner.place import plan
from fuyou_cli.planner.schedule import Visit, plan_schedule
from fuyou_cli.planner.simulate import simulate
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan

from .models import HARDWARE, models, wishes_for

COPYING = replace(HARDWARE, device="cuda", h2d=2e9, d2h=1e9)


def _hidden_by_nothing(spec: ModelSpec, hardware: HardwareProfile, made: Plan, visit: Visit) -> float:
    """Seconds of a visit beside its compute, at least: one micro-batch in, one out."""
    costs = Costs.of(spec, hardware, made)
    up, down = crossing(spec.stages[visit.stage], visit.phase)
    one = costs.boundary / costs.micro_batches
    kept = kept_bytes(spec.stages[visit.stage], made.stages[visit.stage].kept)
    return (up * one + kept * visit.take) / hardware.h2d + (down * one + kept * visit.stash) / hardware.d2h


@settings(max_examples=20, deadline=None)
@given(data=st.data(), spec=models(), micro_batches=st.integers(1, 6))
def test_slow_compute_hides_everything_else(data: st.DataObject, spec: ModelSpec, micro_batches: int) -> None:
    """All in RAM, a store and an update that take no time, and compute so slow that it hides what it can."""
    wishes = replace(data.draw(wishes_for(spec, pinned=False)), device="cuda", clip_grad_norm=1.0, defer=None, gradients="cpu",
                     weights="cpu", states="cpu", boundaries="cpu")  # fmt: skip
    wishes = replace(wishes, numerics=replace(wishes.numerics, batch_size=micro_batches * wishes.numerics.micro_batch_size))
    slow = replace(COPYING, matmul_flops=COPYING.matmul_flops * 1e-5, adamw=((1, 1e18),))
    made = plan(spec, slow, wishes)
    schedule = plan_schedule(spec, made)
    costs = Costs.of(spec, slow, made)
    expected = sum(
        costs.compute_seconds(visit, kept_bytes(spec.stages[visit.stage], made.stages[visit.stage].kept))
        + _hidden_by_nothing(spec, slow, made, visit)
        for visit in schedule.visits
    )
    weights = spec.stored_parameters * 4 * 8 / slow.d2h  # of stages that compute nothing: copies of theirs
    assert expected * (1 - 1e-9) <= simulate(spec, slow, made, schedule).step_seconds <= expected + weights
