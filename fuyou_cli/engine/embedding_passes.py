"""The embedding's visits of a step: by rows where it is a plain lookup, and piece by piece where it is cut."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..core.errors import UsageError
from .embedding import add_embedding_rows, add_scaled_rows, is_plain, padding_at
from .gradients import GradientSum
from .skeleton import TORCH_DTYPE
from .streamed import Call

if TYPE_CHECKING:
    from .executor import Executor


def embedding_backward(
    executor: Executor,
    call: Call,
    ids: torch.Tensor,
    grad_y: torch.Tensor,
    flat: torch.Tensor | None,
    total: GradientSum | None,
) -> None:
    """Adds the gradients of one embedding to `total`. ids: (batch, tokens) int64; grad_y: (batch, tokens, width)."""
    assert total is not None
    if executor.looks_up(call.stage) and grad_y.shape[0] == ids.shape[0]:
        for chosen, grad in _by_token(executor, ids, grad_y):
            _add_rows(executor, call, chosen, grad, total, first=0)
            executor.between()
        return
    whole_ids, whole_grad = executor.inputs([lambda: [ids, grad_y]]).take()
    if flat is None:  # a deferred update needs no weights here; a lookup's gradient does not depend on their values
        params = executor.model.stages[call.stage].params
        flat = torch.zeros(params, dtype=TORCH_DTYPE[executor.model.compute_dtype], device=whole_ids.device)
    with torch.enable_grad(), executor.installed(call.stage, flat, trainable=True) as parameters:
        y = call.run(whole_ids)
        executor.differentiate(y, whole_grad, parameters, total)


def forward_in_pieces(executor: Executor, pieces: Sequence[int], call: Call, ids: torch.Tensor) -> torch.Tensor:
    """The embedding of the whole batch, each piece's rows put where its ids are. ids: (batch, tokens) int64; the result
    (batch, tokens, width) is that of the whole embedding to the bit. Raises UsageError for an id of no piece."""
    end = _rows_of(executor, pieces[-1])[1]
    if int(ids.min()) < 0 or int(ids.max()) >= end:
        raise UsageError(f"the data holds a token id outside of the model's vocabulary of {end} tokens")
    y: torch.Tensor | None = None
    for stage in pieces:
        y = _look_up(executor, stage, call, ids, y)
    assert y is not None
    return y


def _look_up(executor: Executor, stage: int, call: Call, ids: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
    """Puts the rows of one piece in their places in `y`, on the device: there go up those of the pieces before, if any."""
    visit, flat = executor.enter("forward", stage)
    begin = time.monotonic()
    module, before = executor.stages[stage].module, y
    assert isinstance(module, torch.nn.Embedding)
    parts = executor.micro_batches(ids.shape[0])
    arriving = executor.inputs(
        partial(lambda rows: [ids[rows]] if before is None else [ids[rows], before[rows]], rows) for rows in parts
    )
    leaving = executor.crossings.back()
    with torch.no_grad(), padding_at(module, None), executor.installed(stage, flat, trainable=False):
        for rows in parts:
            part_ids, *found = arriving.take()
            chosen = part_ids.reshape(-1)
            here, first = _inside(executor, stage, chosen)
            looked_up = call.run(chosen[here] - first)
            if y is None:
                y = executor.crossings.whole((*ids.shape, looked_up.shape[-1]), looked_up.dtype)
            found = found or [executor.crossings.begun(y[rows])]
            found[0].view(-1, y.shape[-1]).index_copy_(0, here, looked_up)
            leaving.put(found[0], y[rows])
            del found, looked_up
            executor.between()
    leaving.settle()
    executor.leave(visit, begin)
    assert y is not None
    return y


def backward_in_pieces(executor: Executor, pieces: Sequence[int], call: Call, ids: torch.Tensor, grad_y: torch.Tensor) -> None:
    """Every piece's gradients, summed by rows as those of the whole embedding are, and handed over. ids: (batch, tokens)
    int64; grad_y: (batch, tokens, width)."""
    assert grad_y.shape[: ids.dim()] == ids.shape, (grad_y.shape, ids.shape)
    for stage in reversed(pieces):
        visit, _ = executor.enter("backward", stage)
        total = executor.sums.open(stage, resume=visit.resume)
        begin = time.monotonic()
        assert total is not None
        for chosen, grad in _by_token(executor, ids, grad_y):
            here, first = _inside(executor, stage, chosen)
            if here.numel():
                _add_rows(executor, call, chosen[here], grad[here], total, first=first)
            executor.between()
        executor.sums.close(stage, total)
        executor.leave(visit, begin)


def _by_token(executor: Executor, ids: torch.Tensor, grad_y: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """(tokens,) and (tokens, width) of each micro-batch, on the device."""
    parts = executor.micro_batches(ids.shape[0])
    width = grad_y.shape[-1]
    arriving = executor.inputs(
        partial(lambda rows: [ids[rows].reshape(-1), grad_y[rows].reshape(-1, width)], rows) for rows in parts
    )
    for _ in parts:
        yield arriving.take()


def _add_rows(executor: Executor, call: Call, ids: torch.Tensor, grad: torch.Tensor, total: GradientSum, *, first: int) -> None:
    """Adds one micro-batch's gradient. ids: (tokens,) and grad: (tokens, width), on the device."""
    module = executor.stages[call.stage].module
    assert isinstance(module, torch.nn.Embedding)
    if is_plain(module):
        add_embedding_rows(module, ids, grad, total, first=first)
    else:
        add_scaled_rows(module, call.run, ids, grad, total, first=first)


def _inside(executor: Executor, stage: int, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Positions of the ids, on the device, that are rows of the piece, and its first row."""
    first, end = _rows_of(executor, stage)
    return ((ids >= first) & (ids < end)).nonzero().view(-1), first  # sync: how many there are


def _rows_of(executor: Executor, stage: int) -> tuple[int, int]:
    """Of the whole table, those that the piece has."""
    vocabulary = executor.model.stages[stage].vocabulary
    assert vocabulary is not None
    return vocabulary
