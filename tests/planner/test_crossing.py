"""Micro-batches that cross to a device and back, on paper: compute hides all of a visit's copies but the first upload and the
last download, as in a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from fuyou_cli.planner import simulate as simulation
from fuyou_cli.planner.boundary_layout import kept_bytes
from fuyou_cli.planner.costs import Costs
from fuyou_cli.planner.device import BOUNDARIES_ACROSS, crossing
from fuyou_cli.planner.place import plan
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.schedule import Schedule, Visit, plan_schedule
from fuyou_cli.planner.simulate import simulate
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan

from .models import HARDWARE, NUMERICS, model

BLOCK = 1 << 20  # parameters
SPEC = model(2048, *[BLOCK] * 3, 2048, BLOCK)
# Compute that hides whatever it can, and updates that take no time.
SLOW = replace(HARDWARE, device="cuda", h2d=2e9, d2h=1e9, matmul_flops=1e8, adamw=((1, 1e18),))


def _hidden_by_nothing(spec: ModelSpec, hardware: HardwareProfile, made: Plan, visit: Visit, *, bare: bool = False) -> float:
    """Returns seconds of a visit beside its compute: one micro-batch in, one out. An input that is kept goes back beside
    compute, where there is any (not `bare`)."""
    costs = Costs.of(spec, hardware, made)
    up, down = crossing(spec, visit.stage, visit.phase, stash=bare and visit.stash)
    one = costs.boundary / costs.micro_batches
    kept = kept_bytes(spec.stages[visit.stage], made.stages[visit.stage].kept)
    return (up * one + kept * visit.take) / hardware.h2d + (down * one + kept * visit.stash) / hardware.d2h


def _planned(
    spec: ModelSpec, micro_batches: int, kept: Literal["all"] | None, *, batch_on_device: bool = False
) -> tuple[Plan, Schedule]:
    """All in RAM."""
    sizes = dict(batch_size=4 * micro_batches, micro_batch_size=4, max_seq_len=512)
    numerics = replace(NUMERICS, accumulate_dtype="bfloat16", **sizes)
    request = PlanRequest(
        numerics=numerics, model_name="test", device="cuda", clip_grad_norm=1.0, cpu_budget=1 << 40, weights="cpu",
        states="cpu", gradients="cpu", boundaries="cpu", kept=kept, batch_on_device=batch_on_device,
    )  # fmt: skip
    made = plan(spec, SLOW, request)
    return made, plan_schedule(spec, made)


def _compute_seconds(spec: ModelSpec, made: Plan, schedule: Schedule) -> float:
    costs = Costs.of(spec, SLOW, made)
    return sum(
        costs.compute_seconds(visit, kept_bytes(spec.stages[visit.stage], made.stages[visit.stage].kept))
        for visit in schedule.visits
    )


@pytest.mark.parametrize("kept", [None, "all"])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 6, 9])
def test_slow_compute_hides_everything_else(micro_batches: int, kept: Literal["all"] | None) -> None:
    made, schedule = _planned(SPEC, micro_batches, kept)
    compute = _compute_seconds(SPEC, made, schedule)
    once = [_hidden_by_nothing(SPEC, SLOW, made, visit) for visit in schedule.visits]
    bare = [SPEC.stages[visit.stage].kind in ("embedding", "norm") for visit in schedule.visits]  # nothing computes there
    most = sum(
        _hidden_by_nothing(SPEC, SLOW, made, visit, bare=nothing) * (micro_batches if nothing else 1)
        for visit, nothing in zip(schedule.visits, bare, strict=True)
    )
    found = simulate(SPEC, SLOW, made, schedule).step_seconds - compute
    gradients = 2 * 2 * BLOCK / SLOW.d2h  # of the neighbours of those stages, on their way beside nothing
    assert sum(once) * (1 - 1e-6) <= found <= most + gradients


def test_a_batch_that_stays_on_the_device_has_all_its_copies_hidden() -> None:
    """Computes another system's step as one micro-batch: no visit waits for its input or for its output."""
    model = replace(SPEC, stages=tuple(replace(stage, forward_flops=2.0 * BLOCK) for stage in SPEC.stages))
    made, schedule = _planned(model, 1, None)
    compute = _compute_seconds(model, made, schedule)
    ours = simulate(model, SLOW, made, schedule).step_seconds - compute
    other = simulate(model, SLOW, made, schedule, batch_on_device=True).step_seconds - compute
    assert other < 0.1 * ours


def test_where_the_batch_stays_no_visit_waits_for_a_boundary() -> None:
    """Takes what is kept down while its stage computes, and up while the one before it does."""
    made, schedule = _planned(SPEC, 3, None, batch_on_device=True)
    through_host, _ = _planned(SPEC, 3, None)
    compute = _compute_seconds(SPEC, made, schedule)
    found, other = (simulate(SPEC, SLOW, plan, schedule) for plan in (made, through_host))
    bare = 2 * Costs.of(SPEC, SLOW, made).boundary * (1 / SLOW.h2d + 1 / SLOW.d2h)  # of the norm, which computes nothing
    gradients = 2 * 2 * BLOCK / SLOW.d2h
    assert found.step_seconds - compute <= bare + gradients
    assert found.stalls.get(BOUNDARIES_ACROSS, 0.0) <= bare < other.stalls[BOUNDARIES_ACROSS]


def test_boundaries_go_before_weights_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides large copies as a whole, though no micro-batch of compute alone would."""
    spec = model(*[16 * BLOCK] * 6)
    made, schedule = _planned(spec, 8, None)
    weights, forward = 32 * BLOCK / SLOW.h2d, schedule.visits[2]
    fast = replace(SLOW, matmul_flops=forward.flops / (2 * weights), d2h=2e9)
    stalls = [simulate(spec, fast, made, schedule).stalls[BOUNDARIES_ACROSS]]
    monkeypatch.setattr(simulation, "BULK_PRIORITY", 0)
    stalls.append(simulate(spec, fast, made, schedule).stalls[BOUNDARIES_ACROSS])
    assert stalls[0] < 0.7 * stalls[1]
