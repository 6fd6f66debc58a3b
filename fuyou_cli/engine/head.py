"""The head stage: the model's own `ForCausalLM.forward` on pieces of the last hidden state, forward and backward at once.

Logits are never whole: each piece of tokens is computed, its loss differentiated, and dropped. The base model is stubbed
to return the piece, so that whatever the family does to its logits (scaling, soft-capping) is done by its own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from .anatomy import replaced_forwards

IGNORED = -100


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Labels (B, S) moved one to the left: position t predicts token t + 1. The last position predicts nothing."""
    return nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]


class Head:
    """Computes logits through the model's own code."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._piece: torch.Tensor | None = None

    @contextmanager
    def stubbed(self) -> Iterator[None]:
        """Inside, the base model returns the piece set by `loss` instead of computing."""

        def stub(*args: Any, **kwargs: Any) -> BaseModelOutputWithPastAndCrossAttentions:
            return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self._piece)

        stubs: dict[nn.Module, Callable[..., object]] = {self.model.base_model: stub}
        decoder = self.model.get_decoder()
        if decoder is not None:
            stubs[decoder] = stub
        with replaced_forwards(stubs):
            yield
        self._piece = None

    def loss(self, piece: torch.Tensor, targets: torch.Tensor, *, normaliser: int) -> torch.Tensor:
        """Cross entropy of one piece, summed and divided by the step's label tokens.

        piece: (rows, tokens, hidden) on the device; targets: the same rows and tokens, already shifted.
        """
        self._piece = piece
        ids = targets.new_zeros(targets.shape)
        logits = self.model(input_ids=ids, use_cache=False).logits.float()
        total = nn.functional.cross_entropy(
            logits.view(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=IGNORED, reduction="sum"
        )
        return total / normaliser


def pieces(rows: int, tokens: int, chunk: int) -> Iterator[tuple[slice, slice]]:
    """Cuts of one micro-batch (rows, tokens): whole when `chunk` is 0, else row by row in runs of at most `chunk` tokens."""
    if chunk == 0:
        yield slice(0, rows), slice(0, tokens)
        return
    rows_at_once = max(1, chunk // tokens)
    for row in range(0, rows, rows_at_once):
        for begin in range(0, tokens, chunk):
            yield slice(row, min(row + rows_at_once, rows)), slice(begin, min(begin + chunk, tokens))
