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
        parts = executor.micro_batches(ids.shape[0])

        def source(rows: slice) -> list[torch.Tensor]:
            return [ids[rows].reshape(-1), grad_y[rows].reshape(-1, grad_y.shape[-1])]

        arriving = executor.inputs(partial(source, rows) for rows in parts)
        for _ in parts:
            chosen, grad = arriving.take()
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
    flat_ids = ids.reshape(-1)
    y: torch.Tensor | None = None
    found = 0
    for stage in pieces:
        visit, flat = executor.enter("forward", stage)
        begin = time.monotonic()
        here, first = _inside(executor, stage, flat_ids)
        found += here.numel()
        leaving = executor.crossings.back()
        with executor.installed(stage, flat, trainable=False):
            for place, part in _looked_up(executor, stage, call, here, flat_ids[here] - first):
                if y is None:
                    y = executor.crossings.whole((flat_ids.numel(), *part.shape[1:]), part.dtype)
                leaving.place(part, partial(y.index_copy_, 0, place))
                executor.host_work.copied("results placed", part)
            leaving.settle()
        executor.leave(visit, begin)
        executor.between()
    if y is None or found != flat_ids.numel():
        end = executor.model.stages[pieces[-1]].vocabulary
        raise UsageError(f"the data holds a token id outside of the model's vocabulary of {end and end[1]} tokens")
    return y.view(*ids.shape, *y.shape[1:])


def _looked_up(
    executor: Executor, stage: int, call: Call, here: torch.Tensor, ids: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Places among `here`, and the rows `ids` of one piece that belong there: (tokens, width), on the device. On one with
    memory of its own no more at once than a micro-batch has tokens."""
    numerics, module = executor.plan.numerics, executor.stages[stage].module
    assert isinstance(module, torch.nn.Embedding)
    at_once = numerics.micro_batch_size * numerics.max_seq_len if executor.device.separate else max(1, ids.numel())
    arriving = executor.inputs(partial(lambda part: [part], part) for part in ids.split(at_once) if part.numel())
    for place in here.split(at_once):
        if place.numel():
            with torch.no_grad(), padding_at(module, None):
                part = call.run(*arriving.take())
            yield place, part


def backward_in_pieces(executor: Executor, pieces: Sequence[int], call: Call, ids: torch.Tensor, grad_y: torch.Tensor) -> None:
    """Every piece's gradients, summed by rows as those of the whole embedding are, and handed over. ids: (batch, tokens)
    int64; grad_y: (batch, tokens, width)."""
    assert grad_y.shape[: ids.dim()] == ids.shape, (grad_y.shape, ids.shape)
    for stage in reversed(pieces):
        visit, _ = executor.enter("backward", stage)
        total = executor.sums.open(stage, resume=visit.resume)
        begin = time.monotonic()
        assert total is not None
        parts = executor.micro_batches(ids.shape[0])

        def source(stage: int, rows: slice) -> list[torch.Tensor]:
            flat_ids = ids[rows].reshape(-1)
            here, _ = _inside(executor, stage, flat_ids)
            picked = grad_y[rows].reshape(-1, grad_y.shape[-1])[here]
            executor.host_work.copied("inputs gathered", picked)
            return [flat_ids[here], picked]

        arriving = executor.inputs(partial(source, stage, rows) for rows in parts)
        for _ in parts:
            chosen, grad = arriving.take()
            if chosen.numel():
                _add_rows(executor, call, chosen, grad, total, first=_rows_of(executor, stage)[0])
            executor.between()
        executor.sums.close(stage, total)
        executor.leave(visit, begin)


def _add_rows(executor: Executor, call: Call, ids: torch.Tensor, grad: torch.Tensor, total: GradientSum, *, first: int) -> None:
    """Adds one micro-batch's gradient. ids: (tokens,) and grad: (tokens, width), on the device."""
    module = executor.stages[call.stage].module
    assert isinstance(module, torch.nn.Embedding)
    if is_plain(module):
        add_embedding_rows(module, ids, grad, total, first=first)
    else:
        add_scaled_rows(module, call.run, ids, grad, total, first=first)


def _inside(executor: Executor, stage: int, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Positions of the ids that are rows of the piece, and its first row."""
    first, end = _rows_of(executor, stage)
    return ((ids >= first) & (ids < end)).nonzero().view(-1), first


def _rows_of(executor: Executor, stage: int) -> tuple[int, int]:
    """Of the whole table, those that the piece has."""
    vocabulary = executor.model.stages[stage].vocabulary
    assert vocabulary is not None
    return vocabulary
