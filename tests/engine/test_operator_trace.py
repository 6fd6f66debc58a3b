"""Tests work counted on operators as they run: products, and attention without a kernel of its own."""

from __future__ import annotations

import pytest
import torch

from fuyou_cli.engine.operators import OperatorTrace

from .families import FAMILIES
from .rig import Shape, Subject


def test_a_product_of_a_column_and_a_row_is_no_work() -> None:
    trace = OperatorTrace(torch.empty(0), torch.empty(0), (), ())
    with trace:
        torch.bmm(torch.ones(2, 5, 1), torch.ones(2, 1, 7))
        torch.bmm(torch.ones(2, 5, 3), torch.ones(2, 3, 7))
    assert [(operator.index, operator.name) for operator in trace.found] == [(0, "bmm")]
    assert trace.flops == trace.found[0].flops == 2 * 5 * 3 * 7  # of two activations: half, as of attention


@pytest.mark.parametrize(("family", "numbers"), [("falcon", [0, 2, 3, 4]), ("gpt_neox", [0, 1, 2, 3, 4])])
def test_attention_is_one_operator_whatever_it_is_made_of(family: str, numbers: list[int]) -> None:
    """Counts Falcon's, of two products here: it is not kept, and those behind it have the numbers that they have elsewhere."""
    spec = Subject(FAMILIES[family], Shape()).spec
    blocks = [stage for stage in spec.stages if stage.kind == "block"]
    assert [sorted(o.index for o in (*stage.operators, *stage.unneeded)) for stage in blocks] == [numbers] * 2
    assert not any(set(stage.operators) & set(stage.unneeded) for stage in blocks)


def test_attention_reserves_its_summaries_for_any_kernel() -> None:
    """Reserves the output, and a float32 per head and token with tokens rounded up to 32."""
    spec = Subject(FAMILIES["gpt2"], Shape(micro=2, tokens=16)).spec
    attention = next(operator for operator in spec.stages[2].operators if operator.kind == "attention")
    assert attention.bytes == 2 * 16 * 32 * 4 + 4 * 2 * 4 * 32
