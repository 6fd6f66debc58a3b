"""Tests that what backward does not look at is not computed again: the same bits, less work."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import every
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from fuyou_cli.engine.activations import sparing, without_saving
from fuyou_cli.engine.anatomy import dissect
from fuyou_cli.engine.describe import OperatorTrace, inspect
from fuyou_cli.engine.operators import linear_inside, numbers_of
from fuyou_cli.engine.skeleton import build
from fuyou_cli.spec.model import ModelSpec, OperatorSpec

from .comparing import assert_same
from .families import FAMILIES, gpt2, llama
from .rig import Rig, Shape, Subject
from .test_kept_outputs import UNEVEN, WHOLE, _outcome, work_of_a_step

# Where a norm follows the last product its value is needed; where attention and feed-forward are side by side, neither is.
UNNEEDED = {
    "llama": ["mm mlp.down_proj"], "qwen3": ["mm mlp.down_proj"], "mistral": ["mm mlp.down_proj"], "gemma2": [], "gemma3": [],
    "gpt2": ["addmm mlp.c_proj"], "opt": ["addmm fc2"], "gpt_neo": ["addmm mlp.c_proj"],
    "gptj": ["mm attn.out_proj", "addmm mlp.fc_out"], "falcon": ["mm self_attention.dense", "mm mlp.dense_4h_to_h"],
    "gpt_neox": ["addmm attention.dense", "addmm mlp.dense_4h_to_h"], "phi3": ["mm mlp.down_proj"],
}  # fmt: skip


def everything(spec: ModelSpec) -> ModelSpec:
    """The same model, all of its blocks recomputed."""
    return replace(spec, stages=tuple(replace(stage, unneeded=()) for stage in spec.stages))


def names(spec: ModelSpec) -> list[list[str]]:
    return [[operator.name for operator in stage.unneeded] for stage in spec.stages if stage.kind == "block"]


@pytest.mark.parametrize("family", every(3, FAMILIES))
def test_bitwise_as_if_everything_were_recomputed(family: str, tmp_path: Path) -> None:
    number = list(FAMILIES).index(family)
    dtype: Any = ("bfloat16", "float32")[number % 2]
    subject = Subject(FAMILIES[family], Shape(dtype=dtype, accumulate=dtype, **(WHOLE, UNEVEN)[number // 2 % 2]))
    assert names(subject.spec) == [UNNEEDED[family]] * 2
    ours = _outcome(subject, tmp_path / "ours", device="cpu" if number % 3 else "emulated")
    subject.spec = everything(subject.spec)
    expected = _outcome(subject, tmp_path / "everything")
    assert_same(ours, expected)


def test_dropout_after_the_product_needs_no_value(tmp_path: Path) -> None:
    subject = Subject(gpt2(dropout=0.1), Shape(**UNEVEN))
    assert names(subject.spec) == [UNNEEDED["gpt2"]] * 2
    ours = _outcome(subject, tmp_path / "ours")
    subject.spec = everything(subject.spec)
    assert_same(ours, _outcome(subject, tmp_path / "everything"))


@pytest.mark.parametrize(
    ("config", "shape"), [(gpt2(dropout=0.1), Shape(**UNEVEN)), (llama(), Shape(dtype="bfloat16"))], ids=["gpt2", "llama"]
)
def test_forward_as_backward_is_the_same(config: PreTrainedConfig, shape: Shape, tmp_path: Path) -> None:
    """As on a GPU, where attention takes other kernels without gradients: what is recomputed then differs from forward, dropout
    as well. The emulated device does it too."""
    subject = Subject(config, shape)
    expected = _outcome(subject, tmp_path / "usual")
    with Rig(subject, tmp_path / "ours", home="cpu", device="emulated") as rig:
        as_backward = [getattr(own, "as_backward", None) for own in rig.executor.activations]
        assert as_backward == [stage.kind == "block" for stage in subject.spec.stages]
        assert_same((rig.run(2), rig.weights()), expected)


def test_forward_as_backward_saves_nothing() -> None:
    saved: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.shape), lambda _: None):
        x = torch.ones(3, requires_grad=True)
        assert torch.equal(without_saving(lambda x: x.exp() * x, x), x.exp() * x) and len(saved) == 3


def test_the_work_is_spared_as_planned(tmp_path: Path) -> None:
    subject = Subject(llama(num_hidden_layers=3), Shape(batch=4, micro=2))
    spared = 2 * sum(stage.unneeded_flops for stage in subject.spec.stages)
    found = []
    for spec in (subject.spec, everything(subject.spec)):
        subject.spec = spec
        with Rig(subject, tmp_path / str(len(found)), home="cpu") as rig:
            found.append(work_of_a_step(rig))
    assert spared > 0 and [whole - less for less, whole in zip(*found, strict=True)] == [spared] * 2


def test_a_product_is_told_by_its_weight(tmp_path: Path) -> None:
    """Computes one that is numbered differently than it was when the block was inspected, whatever its number."""
    subject = Subject(llama(), Shape())
    expected = _outcome(subject, tmp_path / "expected")
    for step in (-1, -2, 1):
        wrong = tuple(
            replace(stage, unneeded=tuple(replace(operator, index=operator.index + step) for operator in stage.unneeded))
            for stage in subject.spec.stages
        )
        original, subject.spec = subject.spec, replace(subject.spec, stages=wrong)
        assert_same(_outcome(subject, tmp_path / str(step)), expected)
        subject.spec = original


@pytest.mark.parametrize("shared", [False, True])
def test_a_product_whose_weight_another_needs_is_told_by_its_number(shared: bool) -> None:
    weight, x = torch.nn.Parameter(torch.ones(4, 4)), torch.ones(2, 4)
    spared, needed = (OperatorSpec(index=index, name="mm", flops=1.0, bytes=4, weight=0) for index in range(2))
    stage = replace(
        Subject(llama(num_hidden_layers=1), Shape()).spec.stages[1], unneeded=(spared,), operators=(needed,) if shared else ()
    )
    numbers = numbers_of(stage, ())
    assert (numbers is None) == shared
    with sparing(stage, weight.detach().view(-1), numbers, [weight] * len(stage.tensors)):
        first, second = (torch.nn.functional.linear(x, weight) for _ in range(2))
    assert not first.any()
    assert second.tolist() == ((x @ weight.T).tolist() if shared else first.tolist())


@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 4), (1, 2, 3, 4)])
@pytest.mark.parametrize("trained", [False, True])
def test_a_linear_layer_in_a_mode_is_torchs_own(shape: tuple[int, ...], trained: bool) -> None:
    """The same operators: result, graph and gradients."""
    weight = torch.nn.Parameter(torch.randn(5, 4, dtype=torch.bfloat16), requires_grad=trained)
    results = []
    for compute in (torch.nn.functional.linear, lambda x, weight: linear_inside(nullcontext(), (x, weight))):
        x = torch.linspace(-1, 1, math.prod(shape), dtype=torch.bfloat16).view(shape).requires_grad_(True)
        y = compute(x, weight)
        gradients = torch.autograd.grad(y, [x, weight] if trained else [x], torch.ones_like(y))
        results.append((y.detach(), type(y.grad_fn), *gradients))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours is theirs


# ---- work counted on operators -------------------------------------------------------------------------------------


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


# ---- what no hook of autograd shows --------------------------------------------------------------------------------


def unneeded(model: PreTrainedModel) -> list[list[str]]:
    """Names per block."""
    spec = inspect(dissect(model), dtype="float32", micro_batch_size=2, max_seq_len=16, head_chunk_tokens=0)
    return [[operator.name for operator in stage.unneeded] for stage in spec.stages if stage.kind == "block"]


def skeleton() -> Any:
    return build(llama(num_hidden_layers=2), dtype="float32", attention="sdpa")


class _Looks(torch.autograd.Function):
    """Keeps its input where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (1 + 0 * ctx.x)


class _Looking(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Looks.apply(super().forward(x))


class _OnesOwn(LlamaForCausalLM):
    """Stands for a class that is not transformers' own."""


def test_without_any_the_last_product_is_spared() -> None:
    assert unneeded(skeleton()) == [["mm mlp.down_proj"]] * 2


@pytest.mark.parametrize("layer", [0, 1])
def test_a_function_with_a_backward_of_its_own(layer: int) -> None:
    """Puts it in one block of several: those that are alike but for it are spared theirs."""
    model = skeleton()
    model.model.layers[layer].mlp.down_proj.__class__ = _Looking
    expected = [["mm mlp.down_proj"]] * 2
    expected[layer] = []
    assert unneeded(model) == expected


def test_code_that_is_not_transformers() -> None:
    model = skeleton()
    model.__class__ = _OnesOwn
    assert unneeded(model) == [[], []]


def test_blocks_of_equal_shapes_and_other_settings_are_looked_at_one_by_one() -> None:
    """Gives a norm after the product, which needs its value: here only where a flag says so."""
    model = skeleton()
    for number, layer in enumerate(model.model.layers):
        layer.mlp.__class__ = _Scaled
        layer.mlp.squares = number == 1
    assert unneeded(model) == [["mm mlp.down_proj"], []]


class _Scaled(LlamaMLP):
    squares = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * y if self.squares else y
