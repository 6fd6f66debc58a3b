"""Tests what rests with a boundary: the rows of each micro-batch, and behind them the outputs that are kept."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

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

from .models import NUMERICS, OPERATORS, model, stage

BLOCK = stage(1, "block", 2048)
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
