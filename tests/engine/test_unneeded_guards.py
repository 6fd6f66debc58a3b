"""Tests that the whole block is computed again where something may look at a value that no hook of autograd shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from fuyou_cli.engine.anatomy import dissect
from fuyou_cli.engine.describe import inspect
from fuyou_cli.engine.skeleton import build

from .families import llama


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
