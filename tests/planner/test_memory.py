"""Tests what a plan charges where two things lie in one memory, and for the code that libraries keep for each shape; and what
rests with a boundary."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.core.units import GiB
from fuyou_cli.planner.boundary_layout import (
    BoundaryLayout,
    boundary_layout,
    every_operator,
    filled_boundary,
    kept_bytes,
    outputs_size,
    planned_boundary,
    spared_flops,
)
from fuyou_cli.planner.memory import ATTENTION_CODE, MOST_PRODUCTS, PRODUCT_CODE, code_bytes
from fuyou_cli.planner.place import plan
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.spec.plan import Plan

from .models import HARDWARE, NUMERICS, OPERATORS, model
from .models import SPEC as SMALL
from .models import stage as one_stage

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
    """A stage's resting gradients lie where its boundary was."""
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
        {"clip_grad_norm": None, "defer": False},  # no gradients rest
        {"sweeps": 2},  # a sweep's sums rest while the next one keeps its boundaries
    ],
    ids=str,
)
def test_others_do_not(changes: dict[str, Any]) -> None:
    assert taking_turns(planned(**changes)) == []


# ---- code of libraries -------------------------------------------------------------------------------------------------

STAGES = tuple(
    replace(stage, tensors=tuple(replace(tensor, shape=(8 + stage.index, tensor.numel)) for tensor in stage.tensors))
    for stage in SMALL.stages
)
MATRICES = replace(SMALL, stages=STAGES)
SHAPES = {tensor.shape for stage in STAGES if stage.kind != "embedding" for tensor in stage.tensors}
BFLOAT16 = replace(NUMERICS, compute_dtype="bfloat16", max_seq_len=512, document_step=64)


def test_each_width_more_has_its_products() -> None:
    """Three of each trained matrix (forward, and two of backward), one of each where nothing is trained."""
    one, two, eight = (code_bytes(MATRICES, BFLOAT16, widths=widths) for widths in (1, 2, 8))
    assert one == 7 * ATTENTION_CODE and len(SHAPES) > 2  # eight lengths of documents
    assert two - one == 3 * len(SHAPES) * PRODUCT_CODE and eight - one == 7 * (two - one)
    forward = code_bytes(MATRICES, BFLOAT16, widths=2, trains=False)
    assert forward - one == len(SHAPES) * PRODUCT_CODE
    assert code_bytes(MATRICES, BFLOAT16, widths=1 << 20) == one + MOST_PRODUCTS * PRODUCT_CODE
    assert code_bytes(MATRICES, replace(BFLOAT16, compute_dtype="float32"), widths=8) == 0
    whole = replace(BFLOAT16, document_step=0)
    assert code_bytes(MATRICES, whole, widths=8) - 7 * (two - one) == 7 * ATTENTION_CODE  # as many lengths as widths


# ---- what rests with a boundary --------------------------------------------------------------------------------------


BLOCK = one_stage(1, "block", 2048)
subsets = st.sets(st.sampled_from([operator.index for operator in OPERATORS])).map(lambda some: tuple(sorted(some)))


def _laid_out(kept: tuple[int, ...], rows: int, row_bytes: int, micro: int) -> BoundaryLayout:
    return boundary_layout(BLOCK, kept, rows=rows, row_bytes=row_bytes, micro_batch_size=micro)


@given(subsets, st.integers(1, 9), st.integers(1, 9000), st.integers(1, 4))
def test_nothing_overlaps_and_nothing_is_left_out(kept: tuple[int, ...], rows: int, row_bytes: int, micro: int) -> None:
    layout = _laid_out(kept, rows, row_bytes, micro)
    micro_batches = -(-rows // micro)
    taken = []
    for number in range(micro_batches):
        inside = min(micro, rows - number * micro)
        taken.append((number * layout.record, number * layout.record + inside * row_bytes))
        for operator in kept:
            span = layout.output(number, operator)
            assert span.offset % 64 == 0
            assert span.size == next(o.bytes for o in OPERATORS if o.index == operator)
            taken.append((span.offset, span.offset + span.size))
    taken.sort()
    assert all(end <= begin for (_, end), (begin, _) in pairwise(taken))
    assert taken[-1][1] <= layout.size
    assert layout.size % 4096 == 0
    if kept:
        assert layout.record % 4096 == 0


@given(st.integers(1, 9), st.integers(1, 9000), st.integers(1, 4))
def test_where_nothing_is_kept_the_boundary_is_the_tensor_itself(rows: int, row_bytes: int, micro: int) -> None:
    layout = _laid_out((), rows, row_bytes, micro)
    assert layout.record == micro * row_bytes
    assert layout.size - 4096 < rows * row_bytes <= layout.size


@given(subsets)
def test_what_is_spared_and_taken_is_the_sum_over_what_is_kept(kept: tuple[int, ...]) -> None:
    chosen = [operator for operator in OPERATORS if operator.index in kept]
    assert spared_flops(BLOCK, kept) == sum(operator.flops for operator in chosen)
    assert kept_bytes(BLOCK, kept) == sum(operator.bytes for operator in chosen)


@given(subsets.filter(bool), st.integers(1, 300), st.integers(1, 9), st.integers(1, 4))
def test_sizes_of_kept_outputs_add_up_to_the_layout(kept: tuple[int, ...], hidden: int, rows: int, micro: int) -> None:
    spec = model(2048, 2048, 2048, 2048, hidden=hidden)
    numerics = replace(NUMERICS, batch_size=rows, micro_batch_size=micro)
    assert filled_boundary(spec, numerics, outputs_size(BLOCK, kept)) == planned_boundary(spec, numerics, 1, kept).size


def test_every_operator_of_every_block() -> None:
    assert every_operator(model(2048, 2048, 2048, 2048, 2048)) == ((), (0, 2, 3), (0, 2, 3), (), ())
