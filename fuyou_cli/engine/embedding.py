"""The backward of an embedding: gradients by rows, never a dense vocabulary x hidden tensor per micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import nn

from .gradients import GradientSum


def is_lookup(module: nn.Module | None) -> TypeGuard[nn.Embedding]:
    """An embedding whose rows and their gradients do not depend on how often each is looked up."""
    return isinstance(module, nn.Embedding) and module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def is_plain(module: nn.Module | None) -> bool:
    """A lookup and nothing else, so that its gradient is a sum of rows."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and module.max_norm is None
        and not module.scale_grad_by_freq
    )


def add_embedding_rows(
    module: nn.Embedding, ids: torch.Tensor, grad: torch.Tensor, into: GradientSum, *, first: int = 0
) -> None:
    """Adds the gradient of one micro-batch's lookup. ids: (rows, tokens) int64; grad: (rows, tokens, hidden). `first` is
    the id of the sum's first row; ids and grad may be flattened and hold the ids of a piece only.

    The rows are summed by the same kernel, in the same order, as a dense embedding backward: the ids are only renumbered.
    """
    distinct, renumbered = torch.unique(ids, return_inverse=True)
    rows = torch.ops.aten.embedding_dense_backward(
        grad.contiguous(), renumbered, distinct.numel(), _place_of_padding(module, distinct), False
    )
    into.add_rows(0, distinct - first, rows)


def add_scaled_rows(
    module: nn.Embedding,
    run: Callable[[torch.Tensor], Any],
    ids: torch.Tensor,
    grad: torch.Tensor,
    into: GradientSum,
    *,
    first: int,
) -> None:
    """The same for an embedding that scales what it looks up: through its own forward (`run`), over renumbered ids and as
    many rows as there are distinct ones. ids: (tokens,) of one piece; grad: (tokens, hidden)."""
    distinct, renumbered = torch.unique(ids, return_inverse=True)
    weight = torch.zeros(distinct.numel(), grad.shape[-1], dtype=module.weight.dtype, device=grad.device)  # any values
    padding = _place_of_padding(module, distinct)
    with torch.enable_grad(), holding(module, weight, padding=None if padding < 0 else padding) as parameter:
        torch.autograd.backward([run(renumbered)], [grad], inputs=[parameter])
    assert parameter.grad is not None
    into.add_rows(0, distinct - first, parameter.grad)


def _place_of_padding(module: nn.Embedding, distinct: torch.Tensor) -> int:
    """Where the id that learns nothing is among the distinct ones; -1 where it is not."""
    if module.padding_idx is None:
        return -1
    match = (distinct == module.padding_idx).nonzero()
    return int(match[0, 0]) if match.numel() else -1


def looked_up(
    module: nn.Embedding, run: Callable[[torch.Tensor], Any], ids: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """What the module's own forward (`run`) gives for these ids over other weights; no gradient."""
    with torch.no_grad(), holding(module, weight, padding=None):
        y: torch.Tensor = run(ids)
    return y


@contextmanager
def holding(module: nn.Embedding, weight: torch.Tensor, *, padding: int | None) -> Iterator[nn.Parameter]:
    """Inside, the embedding's weight is `weight` (any number of rows), and `padding` the id that learns nothing."""
    before = module._parameters["weight"]
    parameter = nn.Parameter(weight)
    module._parameters["weight"] = parameter
    try:
        with padding_at(module, padding):
            yield parameter
    finally:
        module._parameters["weight"] = before


@contextmanager
def padding_at(module: nn.Embedding, padding: int | None) -> Iterator[None]:
    """Inside, `padding` is the id that learns nothing (None: no id). torch refuses one outside of a piece's rows."""
    before = module.padding_idx
    module.padding_idx = padding
    try:
        yield
    finally:
        module.padding_idx = before
