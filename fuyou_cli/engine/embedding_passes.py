"""The embedding's visits of a step: by rows where it is a plain lookup, and piece by piece where it is cut."""

from __future__ import annotations

import time
from collections.abc import Sequence
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
    device = executor.device.torch_device
    if executor.looks_up(call.stage) and grad_y.shape[0] == ids.shape[0]:
        for rows in executor.micro_batches(ids.shape[0]):
            grad = grad_y[rows].reshape(-1, grad_y.shape[-1]).to(device)
            _add_rows(executor, call, ids[rows].reshape(-1).to(device), grad, total, first=0)
            executor.between()
        return
    if flat is None:  # a deferred update needs no weights here; a lookup's gradient does not depend on their values
        params = executor.model.stages[call.stage].params
        flat = torch.zeros(params, dtype=TORCH_DTYPE[executor.model.compute_dtype], device=device)
    with torch.enable_grad(), executor.installed(call.stage, flat, trainable=True) as parameters:
        y = call.run(ids.to(device))
        executor.differentiate(y, grad_y.to(device), parameters, total)


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
        if here.numel():
            module = executor.stages[stage].module
            assert isinstance(module, torch.nn.Embedding)
            local = (flat_ids[here] - first).to(executor.device.torch_device)
            with torch.no_grad(), executor.installed(stage, flat, trainable=False), padding_at(module, None):
                part = executor.to_host(call.run(local))
            if y is None:
                y = part.new_empty(flat_ids.numel(), *part.shape[1:])
            y[here] = part
            found += here.numel()
        executor.leave(visit, begin)
        executor.between()
    if y is None or found != flat_ids.numel():
        end = executor.model.stages[pieces[-1]].vocabulary
        raise UsageError(f"the data holds a token id outside of the model's vocabulary of {end and end[1]} tokens")
    return y.view(*ids.shape, *y.shape[1:])


def backward_in_pieces(executor: Executor, pieces: Sequence[int], call: Call, ids: torch.Tensor, grad_y: torch.Tensor) -> None:
    """Every piece's gradients, summed by rows as those of the whole embedding are, and handed over. ids: (batch, tokens)
    int64; grad_y: (batch, tokens, width)."""
    assert grad_y.shape[: ids.dim()] == ids.shape, (grad_y.shape, ids.shape)
    for stage in reversed(pieces):
        visit, _ = executor.enter("backward", stage)
        total = executor.sums.open(stage, resume=visit.resume)
        begin = time.monotonic()
        assert total is not None
        for rows in executor.micro_batches(ids.shape[0]):
            flat_ids = ids[rows].reshape(-1)
            here, first = _inside(executor, stage, flat_ids)
            if here.numel():
                chosen = flat_ids[here].to(executor.device.torch_device)
                grad = grad_y[rows].reshape(-1, grad_y.shape[-1])[here].to(executor.device.torch_device)
                _add_rows(executor, call, chosen, grad, total, first=first)
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
    vocabulary = executor.model.stages[stage].vocabulary
    assert vocabulary is not None
    first, end = vocabulary
    return ((ids >= first) & (ids < end)).nonzero().view(-1), first
