"""Tests what an evaluation takes: a pass reads the weights that rest on the ssd once, and as much is computed as in forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.planner.evaluation_schedule import evaluation_cost, evaluation_schedule, evaluations_left
from fuyou_cli.planner.place import plan
from fuyou_cli.spec.model import ModelSpec

from .models import HARDWARE, cut_models, models, request_for

CUDA = replace(HARDWARE, device="cuda", h2d=2e9, d2h=1e9, h2d_mixed=1.2e9, d2h_mixed=0.7e9)


@examples(20)
@given(data=st.data(), spec=st.one_of(models(), cut_models()), device=st.sampled_from(["cpu", "emulated", "cuda"]))
def test_a_pass_reads_and_computes_what_its_schedule_says(data: st.DataObject, spec: ModelSpec, device: str) -> None:
    hardware = CUDA if device == "cuda" else HARDWARE
    made = plan(spec, hardware, replace(data.draw(request_for(spec, swept=True)), device=device))
    cost = evaluation_cost(spec, hardware, made, rows=[1, made.group.batch_size + 1], times=2, run_seconds=10.0)
    schedule = evaluation_schedule(spec, made)
    assert cost.pass_read <= schedule.traffic.read_total
    assert cost.pass_seconds >= 0.99 * max(cost.pass_read / hardware.store_read, sum(v.flops for v in schedule.visits) / 1e15)
    assert (cost.rows, cost.passes, cost.seconds) == (made.group.batch_size + 2, 3, 3 * cost.pass_seconds)
    assert cost.run_share == pytest.approx(6 * cost.pass_seconds / (10 + 6 * cost.pass_seconds))


@pytest.mark.parametrize("every", [None, 2, 3, 7])
@pytest.mark.parametrize("done", [None, 0, 1, 3, 4, 6])
def test_how_many_are_left(every: int | None, done: int | None) -> None:
    after = [step for step in range((done or 0) + 1, 7) if step == 6 or (every and step % every == 0)]
    assert evaluations_left(every, at_start=True, total=6, done=done) == len(after) + (done is None)
