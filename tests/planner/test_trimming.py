"""Tests when the heap is trimmed: what a visit and its micro-batches find room for, on sizes that are given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuyou_cli.core import process
from fuyou_cli.core.units import GiB, MiB
from fuyou_cli.planner.memory import CREEP, DRIFT
from fuyou_cli.planner.place import plan
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.schedule import Visit, plan_schedule
from fuyou_cli.spec.model import ModelSpec, OperatorSpec
from fuyou_cli.spec.plan import Plan
from fuyou_cli.training.step_meter import Trimming

from .models import HARDWARE, NUMERICS, model

BLOCK, HEAD = 120 * MiB, 200 * MiB
WISHES = PlanRequest(
    numerics=replace(NUMERICS, micro_batch_size=1, accumulate_dtype="bfloat16"),
    model_name="test", device="cpu", clip_grad_norm=1.0, cpu_budget=8 * GiB, scratch_size=MiB,
)  # fmt: skip


class Heap:
    """Stands for a process of `size` bytes that had `most` since the last visit, and for what watches it."""

    def __init__(self, spec: ModelSpec, made: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size, self.most, self.trims, self.apart = 0, 0, 0, False
        self.trimming = Trimming(spec, made, self)  # type: ignore[arg-type]
        monkeypatch.setattr(process, "trim", self._trim)

    def look(self) -> int:
        return self.size

    def reached(self) -> int:
        return self.most

    def _trim(self, apart: bool) -> None:
        self.trims += 1
        self.apart = apart

    def between_micro_batches(self, after: Visit, size: int) -> bool:
        """Tells whether a process of `size` bytes is trimmed between two micro-batches of the visit."""
        self.size = 0
        self.trimming.between_visits(after, after)
        self.size, before = size, self.trims
        self.trimming.between_micro_batches()
        return self.trims > before


@pytest.fixture
def spec() -> ModelSpec:
    """Makes blocks whose activations share the heap but for one gradient, a head of logits that do not."""
    spec = model(1 << 20, 1 << 20, 1 << 20, 2048, 1 << 20)
    peaks = {
        "embedding": {"forward_peak": MiB, "backward_peak": 3 * MiB},
        "block": {"forward_peak": 40 * MiB, "backward_peak": BLOCK, "backward_mapped": 30 * MiB},
        "norm": {"forward_peak": 10 * MiB, "backward_peak": 30 * MiB},
        "head": {"forward_peak": HEAD, "backward_peak": HEAD, "forward_mapped": HEAD, "backward_mapped": HEAD},
    }
    return replace(spec, stages=tuple(replace(stage, **peaks[stage.kind]) for stage in spec.stages))


def _visit(spec: ModelSpec, made: Plan, phase: str, kind: str) -> Visit:
    visits = plan_schedule(spec, made).visits
    return next(visit for visit in visits if visit.phase == phase and spec.stages[visit.stage].kind == kind)


@pytest.mark.parametrize(
    ("phase", "kind", "beside"),
    [("forward", "block", 0), ("forward", "norm", 0), ("backward", "block", 30 * MiB), ("head", "head", HEAD)],
)
def test_micro_batches_need_room_for_what_is_mapped(
    phase: str, kind: str, beside: int, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest finds the holes of the one before; a head finds none, nor for what little is not mapped."""
    made = plan(spec, HARDWARE, WISHES)
    process, visit = Heap(spec, made, monkeypatch), _visit(spec, made, phase, kind)
    compute = sum(line.size for line in made.memory if line.what == "compute")
    whole_batch = compute - HEAD  # what a step's batch takes is there whatever the visit
    limit = made.predicted.cpu_peak - compute // 5 - beside - (whole_batch if kind == "head" else 0)
    assert not process.between_micro_batches(visit, limit)
    assert process.between_micro_batches(visit, limit + 1)


def test_a_visit_unlike_the_one_before_needs_room_for_all_it_takes(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(spec, HARDWARE, WISHES)
    process, visit = Heap(spec, made, monkeypatch), _visit(spec, made, "backward", "block")
    before = _visit(spec, made, "backward", "norm")
    compute = sum(line.size for line in made.memory if line.what == "compute")
    limit = made.predicted.cpu_peak - compute // 5 - (compute - HEAD) - BLOCK
    process.size = limit
    process.trimming.between_visits(before, visit)
    assert process.trims == 0
    process.size = limit + 1
    process.trimming.between_visits(before, visit)
    assert process.trims == 1


@pytest.mark.parametrize(
    ("kind", "phase", "apart"), [("head", "head", True), ("block", "backward", True), ("norm", "forward", False)]
)
def test_what_counts_on_mapped_blocks_is_told_to_the_heap(
    kind: str, phase: str, apart: bool, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(spec, HARDWARE, WISHES)
    process, visit = Heap(spec, made, monkeypatch), _visit(spec, made, phase, kind)
    before = _visit(spec, made, "forward", "embedding")
    process.size = made.predicted.cpu_peak
    process.trimming.between_visits(before, visit)
    assert process.trims == 1 and process.apart == apart


def test_a_visit_like_the_one_before_reaches_what_that_one_reached(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reaches it whatever there is now, and until that has crept up."""
    made = plan(spec, HARDWARE, WISHES)
    process, visit = Heap(spec, made, monkeypatch), _visit(spec, made, "backward", "block")
    compute = sum(line.size for line in made.memory if line.what == "compute")
    process.size = process.most = made.predicted.cpu_peak - compute // 4
    process.trimming.between_visits(visit, visit)
    assert process.trims == 0
    process.most += 1
    process.trimming.between_visits(visit, visit)
    assert process.trims == 1


def _keeping(spec: ModelSpec, kept: tuple[int, int]) -> tuple[ModelSpec, Plan]:
    """Makes a plan whose first two blocks keep outputs of so many bytes."""

    def operator(size: int) -> OperatorSpec:
        return OperatorSpec(index=0, name="mm", flops=1.0, bytes=size)

    sizes = dict(zip((1, 2), kept, strict=True))
    stages = tuple(replace(s, operators=(operator(sizes[s.index]),)) if s.index in sizes else s for s in spec.stages)
    spec = replace(spec, stages=stages)
    return spec, plan(spec, HARDWARE, replace(WISHES, kept="all", free_pages=True))


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("kept", [(MiB, 9 * MiB), (9 * MiB, MiB)])
def test_a_block_that_keeps_other_outputs_needs_room_for_the_difference(
    phase: str, kept: tuple[int, int], spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the heap was trimmed between any two such blocks: of LoRA of 1.1 B, 13% of a step were page faults."""
    spec, made = _keeping(spec, kept)
    first, second = (visit for visit in plan_schedule(spec, made).visits if visit.phase == phase and visit.stage in (1, 2))
    compute = sum(line.size for line in made.memory if line.what == "compute")
    process = Heap(spec, made, monkeypatch)
    process.size = made.predicted.cpu_peak  # all of it free pages, which the next block takes as they are
    for beyond in (0, 1):
        process.most = made.predicted.cpu_peak - int(CREEP * compute) - 8 * MiB + beyond
        process.trimming.between_visits(first, second)
        assert process.trims == beyond


def test_free_pages_are_what_lets_blocks_follow_each_other(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A heap that drifts by DRIFT is not trimmed where the plan has room for its free pages."""
    spec = replace(spec, stages=tuple(replace(s, backward_peak=BLOCK) if s.kind == "head" else s for s in spec.stages))
    tight, roomy = (plan(spec, HARDWARE, replace(WISHES, free_pages=free)) for free in (False, True))
    line = next(line for line in roomy.memory if line.what == "free pages")
    assert roomy.predicted.cpu_peak == tight.predicted.cpu_peak + line.size
    for made, trims in ((tight, 1), (roomy, 0)):
        process = Heap(spec, made, monkeypatch)
        before, after = [v for v in plan_schedule(spec, made).visits if v.phase == "forward" and v.stage in (1, 2)]
        process.most = tight.predicted.cpu_peak + int(DRIFT * BLOCK)
        process.trimming.between_visits(before, after)
        assert process.trims == trims
