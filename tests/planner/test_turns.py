"""A stage's boundary and its resting gradients in one memory: where that is so, what it saves, and when it is used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fuyou_cli.core.units import GiB
from fuyou_cli.planner.place import plan
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.spec.plan import Plan

from .models import HARDWARE, NUMERICS, model

SPEC = model(64 << 20, *[64 << 20] * 4, 2048, 64 << 20, hidden=64)
REQUEST = PlanRequest(
    numerics=replace(NUMERICS, accumulate_dtype="bfloat16", batch_size=8, micro_batch_size=2), model_name="test",
    device="emulated", clip_grad_norm=1.0, cpu_budget=8 * GiB, weights="cpu", states="cpu", gradients="cpu", boundaries="cpu",
)  # fmt: skip


def planned(**changes: Any) -> Plan:
    return plan(SPEC, HARDWARE, replace(REQUEST, **changes))


def taking_turns(chosen: Plan) -> list[int]:
    return [stage.stage for stage in chosen.stages if stage.takes_turns]


def test_blocks_take_turns_and_the_memory_counts_once() -> None:
    chosen, apart = planned(), planned(gradients="ssd")
    blocks = [stage.index for stage in SPEC.stages if stage.kind == "block"]
    assert set(blocks) <= set(taking_turns(chosen)) and taking_turns(apart) == []
    for stage in (chosen.stages[index] for index in blocks):
        assert stage.gradients_ram and stage.boundary_ram
        assert stage.boundary_ram.offset == stage.gradients_ram.offset
    lines = {line.what: line.size for line in chosen.memory if line.tier == "cpu"}
    both = [(stage.gradients_ram, stage.boundary_ram) for stage in chosen.stages]
    needed = sum(max(span.size for span in pair if span) for pair in both if any(pair))
    assert lines["gradients"] + lines.get("boundaries", 0) == needed
    without = sum(span.size for pair in both for span in pair if span)
    assert needed < without


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "cpu"},  # gradients are summed where they rest, while the boundary is read
        {"clip_grad_norm": None, "defer": 0.0},  # no gradients rest
        {"sweeps": 2},  # a sweep's sums rest while the next one keeps its boundaries
    ],
    ids=str,
)
def test_others_do_not(changes: dict[str, Any]) -> None:
    assert taking_turns(planned(**changes)) == []
