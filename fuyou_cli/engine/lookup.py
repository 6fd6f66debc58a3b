"""Looks rows of an embedding up, and their gradients: never a dense tensor per micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import nn

from .gradients import GradientSum
from .skeleton import LIBRARY_ERRORS


def is_lookup(module: nn.Module | None) -> TypeGuard[nn.Embedding]:
    """Tells whether it is an embedding whose rows and their gradients do not depend on how often each is looked up."""
    return isinstance(module, nn.Embedding) and module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def is_plain(module: nn.Module | None) -> bool:
    """Tells whether it is a lookup and nothing else, so that its gradient is a sum of rows."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and module.max_norm is None
        and not module.scale_grad_by_freq
    )


def add_rows(
    module: nn.Embedding,
    run: Callable[[torch.Tensor], Any],
    ids: torch.Tensor,
    grad: torch.Tensor,
    into: GradientSum,
    *,
    first: int,
) -> None:
    """Adds the gradient of one micro-batch's lookup, as many rows as there are distinct ids.

    ids: (tokens,) int64, those of a piece only; grad: (tokens, hidden). `first`: the id of the sum's first row.
    """
    distinct, renumbered = torch.unique(ids, return_inverse=True)
    padding = _place_of_padding(module, distinct)
    if is_plain(module):  # summed by the kernel and in the order of a dense embedding backward
        size = distinct.numel()
        rows = torch.ops.aten.embedding_dense_backward(grad.contiguous(), renumbered, size, padding, False)
    else:  # scaled: through its own forward
        weight = torch.zeros(distinct.numel(), grad.shape[-1], dtype=module.weight.dtype, device=grad.device)  # any values
        with torch.enable_grad(), holding(module, weight, padding=None if padding < 0 else padding) as parameter:
            torch.autograd.backward([run(renumbered)], [grad], inputs=[parameter])
        assert parameter.grad is not None
        rows = parameter.grad
    into.add_rows(0, distinct - first, rows)


def _place_of_padding(module: nn.Embedding, distinct: torch.Tensor) -> int:
    """Finds the id that learns nothing among the distinct ones; -1 where it is not."""
    if module.padding_idx is None:
        return -1
    match = (distinct == module.padding_idx).nonzero()
    return int(match[0, 0]) if match.numel() else -1


def looked_up(
    module: nn.Embedding, run: Callable[[torch.Tensor], Any], ids: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Runs the module's own forward (`run`) for these ids over other weights; no gradient."""
    with torch.no_grad(), holding(module, weight, padding=None):
        y: torch.Tensor = run(ids)
    return y


def scales_rows(embedding: nn.Embedding) -> bool:
    """Tells whether the module's own forward gives a linear image of each id's row, whatever the id's number and neighbours."""
    if type(embedding).forward is nn.Embedding.forward:
        return True
    rows = torch.arange(1.0, 1.0 + 6 * embedding.embedding_dim).view(6, embedding.embedding_dim).sin()
    rows = rows.to(embedding.weight.dtype)
    last = embedding.num_embeddings - 1
    try:
        whole = looked_up(embedding, embedding.forward, torch.arange(6), rows)
        part = looked_up(embedding, embedding.forward, torch.tensor([2, 0, 1]), rows[3:])
        doubled = looked_up(embedding, embedding.forward, torch.arange(6), -2 * rows)
        ends = looked_up(embedding, embedding.forward, torch.tensor([[0], [last]]), rows[:1].expand(last + 1, -1))
    except LIBRARY_ERRORS:
        return False
    return (
        whole.shape == rows.shape
        and torch.equal(whole[[5, 3, 4]], part)
        and torch.equal(doubled, -2 * whole)
        and torch.equal(ends, whole[:1].expand(2, 1, -1))
    )


@contextmanager
def holding(module: nn.Embedding, weight: torch.Tensor, *, padding: int | None) -> Iterator[nn.Parameter]:
    """Has `weight` (any number of rows) as the embedding's weight inside, and `padding` the id that learns nothing."""
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
    """Has `padding` inside as the id that learns nothing (None: no id). torch refuses one outside of a piece's rows."""
    before = module.padding_idx
    module.padding_idx = padding
    try:
        yield
    finally:
        module.padding_idx = before
