"""The head computed in pieces gives what it gives whole."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import every
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from fuyou_cli.engine.loss import Head, pieces

from .comparing import distance, relative
from .families import FAMILIES, llama
from .rig import Rig, Shape, Subject

HEADS: dict[str, PreTrainedConfig] = {
    "untied": llama(),
    "tied": llama(tie_word_embeddings=True),
    "tied, logits capped": FAMILIES["gemma2"],
}


class BatchedProducts(TorchDispatchMode):
    """Notes the shapes that batched matrix products multiply by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bmm.default:
            self.seen.append(tuple(args[1].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("head", "chunk"), every(2, product(HEADS, [5, 16, 20])))
def test_in_pieces(head: str, chunk: int, tmp_path: Path) -> None:
    """Cuts each row unevenly by 5 tokens, takes one row with 16, and leaves a rest with 20; a micro-batch has 32."""
    whole, cut = (Subject(HEADS[head], Shape(chunk=size)) for size in (0, chunk))
    with Rig(whole, tmp_path / "whole") as rig:
        expected, weights = rig.run(5), rig.weights()
    with Rig(cut, tmp_path / "cut") as rig:
        assert relative(rig.run(5), expected) <= 1e-6
        assert distance(rig.weights(), weights) <= 1e-6


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("chunk", [0, 1, 3, 7, 8, 15, 16, 17, 100])
def test_every_token_is_in_one_piece(rows: int, chunk: int) -> None:
    tokens = 8
    seen = [
        (row, token)
        for row_cut, token_cut in pieces(rows, tokens, chunk)
        for row in range(rows)[row_cut]
        for token in range(tokens)[token_cut]
    ]
    assert sorted(seen) == [(row, token) for row in range(rows) for token in range(tokens)]


@pytest.mark.parametrize("chunk", [1, 3, 8, 20])
def test_no_piece_is_larger_than_asked(chunk: int) -> None:
    for rows, tokens in pieces(4, 8, chunk):
        assert len(range(4)[rows]) * len(range(8)[tokens]) <= chunk


def test_pieces_are_one_product_with_weights_that_have_no_gradient() -> None:
    """Torch copies bfloat16 weights that need no gradient for each row of a piece whose strides are not regular."""
    model: Any = AutoModelForCausalLM.from_config(llama()).requires_grad_(False)
    hidden, head = torch.randn(3, 20, model.config.hidden_size), Head(model)
    whole = model.lm_head(hidden)
    with head.stubbed(), BatchedProducts() as products:
        for cut in pieces(3, 20, 7):
            assert torch.allclose(head.logits(hidden[cut]), whole[cut], atol=1e-6)
    assert products.seen == []
