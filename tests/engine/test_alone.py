"""Tests that a stage by itself computes what it computes in a run: it is called alike, and its gradients are the model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn import every
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from fuyou_cli.engine.alone import BlockAlone, HeadAlone
from fuyou_cli.engine.anatomy import Anatomy, dissect
from fuyou_cli.engine.calls import StageCall
from fuyou_cli.engine.cutting import cut_vocabulary
from fuyou_cli.engine.describe import inspect
from fuyou_cli.engine.skeleton import build
from fuyou_cli.spec.model import Dtype, ModelSpec, StageSpec

from .families import FAMILIES, opt

SHAPE = (1, 12)
CPU = torch.device("cpu")


def specified(family: str, *, rows: int = 0, chunk: int = 0, dtype: Dtype = "float32") -> tuple[Anatomy, ModelSpec]:
    torch.set_num_threads(1)
    config = opt(projected_to=16) if family == "opt, projected" else FAMILIES[family]
    anatomy = cut_vocabulary(dissect(build(config, dtype=dtype, attention="sdpa")), rows)
    spec = inspect(anatomy, dtype=dtype, micro_batch_size=SHAPE[0], max_seq_len=SHAPE[1], head_chunk_tokens=chunk)
    return anatomy, spec


@pytest.mark.parametrize("family", every(2, ["llama", "gemma3", "gpt2", "opt, projected", "gpt_neo", "falcon", "gpt_neox"]))
def test_a_block_is_called_as_its_model_calls_it(family: str) -> None:
    anatomy, spec = specified(family)
    stage = next(stage for stage in spec.stages if stage.kind == "block")
    alone = BlockAlone(anatomy, stage, dtype="float32", accumulate="float32", shape=SHAPE, device=CPU)
    assert alone.tokens == 12 and alone.flops == stage.forward_flops
    seen: list[tuple[Any, Any]] = []
    model = AutoModelForCausalLM.from_config(
        anatomy.model.config, dtype=torch.float32, attn_implementation=anatomy.model.config._attn_implementation
    )
    block: nn.Module = model.base_model.get_submodule(stage.name)
    block.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    model(input_ids=torch.zeros(SHAPE, dtype=torch.long), use_cache=False)
    call, x = StageCall.split(stage.name, block.forward, *seen[0])
    assert (alone._input.shape, alone._input.dtype) == (x.shape, x.dtype)
    ours, theirs = (tree_leaves([one.positional, one.named, one.key]) for one in (alone._call, call))
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    alone.forward()
    alone.backward()
    _, total = alone._visits[1]
    assert total.touched == set(range(len(stage.tensors)))
    assert bool(total.flat[: stage.tensors[0].numel].abs().sum() > 0)


def test_visits_take_turns_with_weights_that_no_cache_holds() -> None:
    anatomy, spec = specified("llama")
    stage = next(stage for stage in spec.stages if stage.kind == "block")
    alone = BlockAlone(
        anatomy, stage, dtype="float32", accumulate="float32", shape=SHAPE, device=CPU, micro_batches=2
    )  # fmt: skip
    count = len(alone._visits)
    assert 1 < count <= 16
    for number in range(2 * count):
        alone.backward()
        assert sum(bool(total.touched) for _, total in alone._visits) == number // 2 + 1
    assert all(bool(total.flat[: stage.tensors[0].numel].abs().sum() > 0) for _, total in alone._visits)


def test_a_blocks_gradients_add_up_in_a_wider_sum() -> None:
    anatomy, spec = specified("llama", dtype="bfloat16")
    stage = next(stage for stage in spec.stages if stage.kind == "block")
    alone = BlockAlone(anatomy, stage, dtype="bfloat16", accumulate="float32", shape=SHAPE, device=CPU, micro_batches=2)
    alone.backward()
    _, total = alone._visits[0]
    spans = [slice(tensor.offset, tensor.offset + tensor.numel) for tensor in stage.tensors]
    first = [total.flat[span].clone() for span in spans]
    alone.backward()
    assert total.flat.dtype == torch.float32
    assert all(torch.equal(total.flat[span], 2 * once) for span, once in zip(spans, first, strict=True))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_neox"])
def test_what_is_kept_is_given_back_and_not_a_bit_changes(family: str) -> None:
    """Gives it back as often as it is asked for."""
    anatomy, spec = specified(family)
    stage = next(stage for stage in spec.stages if stage.kind == "block")
    alone = BlockAlone(
        anatomy, stage, dtype="float32", accumulate="float32", shape=SHAPE, device=CPU, micro_batches=100
    )  # fmt: skip
    assert 0 < alone.given_flops < alone.backward_flops
    _, total = alone._visits[0]
    alone.backward()
    once = _gradients(stage, total.flat)
    assert len(once) > 3 and all(bool(gradient.abs().sum() > 0) for gradient in once[:1])
    for _ in range(2):
        alone.backward_from_kept()
        total.flat.zero_()
        alone.backward_from_kept()
        assert all(torch.equal(one, other) for one, other in zip(once, _gradients(stage, total.flat), strict=True))
    assert set(alone._outputs) == {operator.index for operator in stage.operators}


def _gradients(stage: StageSpec, flat: torch.Tensor) -> list[torch.Tensor]:
    return [flat[tensor.offset : tensor.offset + tensor.numel].clone() for tensor in stage.tensors]


@pytest.mark.parametrize("rows", [0, 64])
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # untied, and tied with capped logits
def test_a_head_is_taken_chunk_by_chunk(family: str, rows: int) -> None:
    anatomy, spec = specified(family, rows=rows, chunk=4)
    head = next(stage for stage in spec.stages if stage.kind == "head")
    owner = spec.stages[spec.owner(head.index)]
    alone = HeadAlone(anatomy, head, owner, dtype="float32", accumulate="float32", shape=SHAPE, chunk=4, device=CPU)
    assert alone.tokens == 4 and alone.flops == pytest.approx(head.forward_flops / 3)
    alone.forward()
    alone.backward()
    weights = next(tensor for tensor in owner.tensors if len(tensor.shape) == 2)
    gradient = alone._total.flat[weights.offset : weights.offset + weights.numel].view(weights.shape)
    assert bool(torch.isfinite(gradient).all()) and bool((gradient.abs().sum(1) > 0).all())  # every row has its share


def test_a_whole_heads_gradient_is_the_losss() -> None:
    anatomy, spec = specified("llama")
    head = spec.stages[-1]
    alone = HeadAlone(anatomy, head, head, dtype="float32", accumulate="float32", shape=SHAPE, chunk=0, device=CPU)
    alone.backward()
    (tensor,) = head.tensors
    weight = alone._flat[: tensor.numel].view(tensor.shape).clone().requires_grad_(True)
    logits = alone._hidden.flatten(0, 1) @ weight.T
    nn.functional.cross_entropy(logits, alone._targets.flatten()).backward()
    assert weight.grad is not None
    assert torch.allclose(alone._total.flat[: tensor.numel].view(tensor.shape), weight.grad, atol=1e-6)


@pytest.mark.parametrize(("experts", "chosen"), [(128, 8), (512, 10)])
def test_tokens_are_sent_to_all_experts(experts: int, chosen: int) -> None:
    """Counts rows as a run's begin: no expert has none, and none has twice the mean. A row of the router is a power of two."""
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=2048, moe_intermediate_size=16, num_hidden_layers=1, num_attention_heads=4, head_dim=32,
        num_key_value_heads=2, num_experts=experts, num_experts_per_tok=chosen,
    )  # fmt: skip
    torch.manual_seed(0)
    shape, anatomy = (2, 512), dissect(build(config, dtype="bfloat16", attention="sdpa"))
    spec = inspect(anatomy, dtype="bfloat16", micro_batch_size=2, max_seq_len=512, head_chunk_tokens=0)
    block = next(stage for stage in spec.stages if stage.kind == "block")
    alone = BlockAlone(anatomy, block, dtype="bfloat16", accumulate="float32", shape=shape, device=CPU)
    assert block.expert_work is not None and alone.expert_rows == 1024 * chosen / experts
    assert alone._stage.module is not None
    seen: list[torch.Tensor] = []
    router = alone._stage.module.get_submodule("mlp.gate")
    router.register_forward_hook(lambda module, args, out: seen.append(out[2]))
    alone.forward()
    rows = torch.bincount(seen[0].flatten(), minlength=experts)
    assert rows.sum() == 1024 * chosen and rows.min() > 0 and rows.max() < 2 * alone.expert_rows
