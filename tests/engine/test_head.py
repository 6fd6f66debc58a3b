"""The head computed in pieces gives what it gives whole."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from drawn import every
from transformers import PreTrainedConfig

from fuyou_cli.engine.loss import pieces

from .comparing import distance, relative
from .families import FAMILIES, llama
from .rig import Rig, Shape, Subject

HEADS: dict[str, PreTrainedConfig] = {
    "untied": llama(),
    "tied": llama(tie_word_embeddings=True),
    "tied, logits capped": FAMILIES["gemma2"],
}


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
