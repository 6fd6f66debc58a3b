"""The backward of an embedding: gradients by rows, never a dense vocabulary x hidden tensor per micro-batch."""

from __future__ import annotations

import torch
from torch import nn

from .gradients import GradientSum


def is_plain(module: nn.Module | None) -> bool:
    """A lookup and nothing else, so that its gradient is a sum of rows."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and module.max_norm is None
        and not module.scale_grad_by_freq
    )


def add_embedding_rows(module: nn.Embedding, ids: torch.Tensor, grad: torch.Tensor, into: GradientSum) -> None:
    """Adds the gradient of one micro-batch's lookup. ids: (rows, tokens) int64; grad: (rows, tokens, hidden).

    The rows are summed by the same kernel, in the same order, as a dense embedding backward: the ids are only renumbered.
    """
    distinct, renumbered = torch.unique(ids, return_inverse=True)
    padding = -1
    if module.padding_idx is not None:
        match = (distinct == module.padding_idx).nonzero()
        padding = int(match[0, 0]) if match.numel() else -1
    rows = torch.ops.aten.embedding_dense_backward(grad.contiguous(), renumbered, distinct.numel(), padding, False)
    into.add_rows(0, distinct, rows)
