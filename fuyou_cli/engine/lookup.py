"""Looks up rows of an embedding and sums their gradients, without a dense tensor per micro-batch.

The host counts the ids in each piece, and the distinct ones. Asking a device would wait for all work submitted to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn

from .gradients import GradientSum
from .skeleton import LIBRARY_ERRORS


def is_lookup(module: nn.Module | None) -> TypeGuard[nn.Embedding]:
    """Tells whether the module is an embedding whose rows and gradients do not depend on how often each row is looked up."""
    return isinstance(module, nn.Embedding) and module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def is_plain(module: nn.Module | None) -> bool:
    """Tells whether the module is only a lookup, so that its gradient is a sum of rows."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and module.max_norm is None
        and not module.scale_grad_by_freq
    )


@dataclass(frozen=True, slots=True)
class Looked:
    """Describes what one micro-batch looks up in a table, or in one piece of it. All tensors but `known` are on the device."""

    here: torch.Tensor | None  # places of these ids among the micro-batch's tokens; None: all tokens
    distinct: torch.Tensor  # distinct ids in rising order
    known: torch.Tensor  # the same in host memory


OfMicroBatches = Sequence[Sequence[Looked]]  # indexed by micro-batch and piece


class StepIds:
    """Holds what all micro-batches of a step look up, found on the host and placed on the device at once. `ids`: the ids in the
    form that the model's forward is given."""

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        pieces: Sequence[tuple[int, int]],
        place: Callable[[torch.Tensor], torch.Tensor],
        *,
        begins: Sequence[int],
    ) -> None:
        """Finds what is looked up. `parts`: ids of each micro-batch in host memory; `pieces`: rows (first, end) of each piece,
        empty if the table is not cut; `begins`: where each micro-batch begins among the ids that the forward is given, and
        where these end."""
        self._ids: tuple[torch.Tensor, int] | None = None  # and their version: the model's code may change them in place
        sizes = [part.numel() for part in parts]
        self._begins = {place: number for number, place in enumerate(begins)}
        rows: Sequence[tuple[int, int] | None] = pieces or [None]
        known = [[_known(part.reshape(-1), of_piece) for of_piece in rows] for part in parts]
        # The size does not depend on the ids, because a plan charges it.
        table = torch.zeros((2 if pieces else 1) * sum(sizes), dtype=torch.long)
        found, end = [tensor for part in known for of_piece in part for tensor in of_piece if tensor is not None], 0
        for tensor in found:
            table[end : end + tensor.numel()] = tensor
            end += tensor.numel()
        self._known, self._firsts = known, [first for first, _ in pieces] or [0]
        left = iter(place(table)[:end].split([tensor.numel() for tensor in found]))
        self.looked: OfMicroBatches = [
            [Looked(None if here is None else next(left), next(left), distinct) for here, distinct in part] for part in known
        ]

    def are(self, ids: torch.Tensor) -> None:
        """Takes note of the tensor of ids that the model's forward is given."""
        self._ids = ids, ids._version

    def rows(self) -> list[torch.Tensor]:
        """Returns the distinct rows of each piece, or of the whole table, that all micro-batches look up: 1-D, in host memory,
        counted from the piece's own first row."""
        by_piece = zip(*([distinct for _, distinct in part] for part in self._known), strict=True)
        return [torch.cat(found).unique() - first for found, first in zip(by_piece, self._firsts, strict=True)]

    def part(self, ids: torch.Tensor) -> OfMicroBatches | None:
        """Returns what is known of `ids`, in any shape, if they are whole micro-batches of the forward's ids, unchanged since;
        otherwise None."""
        given, version = self._ids or (ids, -1)
        if given._version != version or given.device != ids.device or not ids.is_contiguous():
            return None
        first = (ids.data_ptr() - given.data_ptr()) // given.element_size()
        begin, end = (self._begins.get(place) for place in (first, first + ids.numel()))
        return None if begin is None or end is None else self.looked[begin:end]


def _known(ids: torch.Tensor, rows: tuple[int, int] | None) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Finds which ids (host memory) are in these rows, and the distinct ones among them."""
    if rows is None:
        return None, ids.unique()
    here = ((ids >= rows[0]) & (ids < rows[1])).nonzero().view(-1)
    return here, ids[here].unique()


def add_rows(
    module: nn.Embedding,
    run: Callable[[torch.Tensor], Any],
    looked: Looked,
    ids: torch.Tensor,
    grad: torch.Tensor,
    into: GradientSum,
    *,
    first: int,
) -> None:
    """Adds the gradient of one micro-batch's lookup: one row per distinct id.

    ids: (tokens,) int64, of the whole micro-batch; grad: (tokens, hidden). `first`: the id of the sum's first row.
    """
    if looked.here is not None:
        ids, grad = ids[looked.here], grad[looked.here]
    distinct, padding = looked.distinct, _place_of_padding(module, looked.known)
    renumbered = torch.searchsorted(distinct, ids)
    if is_plain(module):  # the kernel sums in the same order as a dense embedding backward
        size = distinct.numel()
        rows = torch.ops.aten.embedding_dense_backward(grad.contiguous(), renumbered, size, padding, False)
    else:  # a scaled lookup: through its own forward
        # Any values: the gradient does not depend on them.
        weight = torch.zeros(distinct.numel(), grad.shape[-1], dtype=module.weight.dtype, device=grad.device)
        with torch.enable_grad(), holding(module, weight, padding=None if padding < 0 else padding) as parameter:
            torch.autograd.backward([run(renumbered)], [grad], inputs=[parameter])
        assert parameter.grad is not None
        rows = parameter.grad
    into.add_rows(0, distinct - first, rows)


def _place_of_padding(module: nn.Embedding, distinct: torch.Tensor) -> int:
    """Finds the id that learns nothing among the distinct ones (host memory). Returns -1 if it is not there."""
    if module.padding_idx is None:
        return -1
    match = (distinct == module.padding_idx).nonzero()
    return int(match[0, 0]) if match.numel() else -1


def looked_up(
    module: nn.Embedding, run: Callable[[torch.Tensor], Any], ids: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Runs the module's own forward (`run`) for these ids with other weights, without gradient."""
    with torch.no_grad(), holding(module, weight, padding=None):
        y: torch.Tensor = run(ids)
    return y


def scales_rows(embedding: nn.Embedding) -> bool:
    """Tells whether the module's own forward gives a linear image of each id's row that does not depend on the id's number or
    its neighbours."""
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
    """Sets `weight` (any number of rows) as the embedding's weight inside the context, and `padding` as the id that learns
    nothing."""
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
    """Sets `padding` inside the context as the id that learns nothing (None: no id). torch refuses one outside of a piece's
    rows."""
    before = module.padding_idx
    module.padding_idx = padding
    try:
        yield
    finally:
        module.padding_idx = before
