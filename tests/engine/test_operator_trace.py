"""Work counted on operators as they run: experts that tokens choose, attention without a kernel of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fuyou_cli.engine.operator_trace import OperatorTrace, unseen_expert_flops
from fuyou_cli.spec.model import TensorSpec

from .families import FAMILIES
from .rig import Shape, Subject

EXPERTS, WIDTH, HIDDEN, TOKENS, ACTIVE = 8, 16, 32, 24, 2
CONFIG = SimpleNamespace(num_experts=EXPERTS, num_experts_per_tok=ACTIVE)
ROUTER = TensorSpec(name="r", shape=(EXPERTS, WIDTH), offset=0, numel=EXPERTS * WIDTH, decay=True)
EXPERT = TensorSpec(name="e", shape=(EXPERTS, WIDTH, HIDDEN), offset=ROUTER.numel, numel=EXPERTS * WIDTH * HIDDEN, decay=True)


def _traced(*, grouped: bool) -> OperatorTrace:
    """A router, and its experts as one product over sorted tokens, or not to be seen."""
    with FakeTensorMode():
        flat = torch.empty(ROUTER.numel + EXPERT.numel, dtype=torch.bfloat16)
        router = flat[: ROUTER.numel].view(ROUTER.shape)
        experts = flat[ROUTER.numel :].view(EXPERT.shape)
        x = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16)
        trace = OperatorTrace(flat, (ROUTER, EXPERT), ("gate.weight", "experts.up_proj"))
        with trace:
            torch.mm(x, router.t())
            if grouped:
                chosen = torch.empty(TOKENS * ACTIVE, WIDTH, dtype=torch.bfloat16)
                ends = torch.zeros(EXPERTS, dtype=torch.int32)
                torch.ops.aten._grouped_mm(chosen, experts, ends)
    return trace


def test_experts_count_as_often_as_they_are_used() -> None:
    """The same, whether their product is seen or the configuration says how many are active."""
    seen, unseen = _traced(grouped=True), _traced(grouped=False)
    router = 2 * TOKENS * WIDTH * EXPERTS
    experts = 2 * TOKENS * ACTIVE * WIDTH * HIDDEN
    assert seen.flops == router + experts
    assert unseen_expert_flops(seen, TOKENS, CONFIG) == 0
    assert unseen.flops == router
    assert unseen_expert_flops(unseen, TOKENS, CONFIG) == experts
    assert [operator.name for operator in seen.found] == ["mm gate"]


def test_a_product_of_a_column_and_a_row_is_no_work() -> None:
    trace = OperatorTrace(torch.empty(0), (), ())
    with trace:
        torch.bmm(torch.ones(2, 5, 1), torch.ones(2, 1, 7))
        torch.bmm(torch.ones(2, 5, 3), torch.ones(2, 3, 7))
    assert [(operator.index, operator.name) for operator in trace.found] == [(0, "bmm")]
    assert trace.flops == trace.found[0].flops == 2 * 5 * 3 * 7  # of two activations: half, as of attention


@pytest.mark.parametrize(("family", "numbers"), [("falcon", [0, 2, 3, 4]), ("gpt_neox", [0, 1, 2, 3, 4])])
def test_attention_is_one_operator_whatever_it_is_made_of(family: str, numbers: list[int]) -> None:
    """Falcon's is two products here: it is not kept, and those behind it have the numbers that they have elsewhere."""
    spec = Subject(FAMILIES[family], Shape()).spec
    blocks = [stage for stage in spec.stages if stage.kind == "block"]
    assert [sorted(o.index for o in (*stage.operators, *stage.unneeded)) for stage in blocks] == [numbers] * 2
    assert not any(set(stage.operators) & set(stage.unneeded) for stage in blocks)


def test_attention_reserves_its_summaries_for_any_kernel() -> None:
    """Output, and a float32 per head and token with tokens rounded up to 32."""
    spec = Subject(FAMILIES["gpt2"], Shape(micro=2, tokens=16)).spec
    attention = next(operator for operator in spec.stages[2].operators if operator.kind == "attention")
    assert attention.bytes == 2 * 16 * 32 * 4 + 4 * 2 * 4 * 32
