"""The head's visits of a step: the loss, its gradient with respect to the last hidden state, and the head's own gradients.

A whole head is visited once, forward and backward together. A head cut along the vocabulary is passed over twice: the
loss needs every column of the logits before the gradient of any is known.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..core.errors import UsageError
from .gradients import add_in_pieces
from .head import Part, TokenLoss, pieces

if TYPE_CHECKING:
    from .executor import Executor


def run_head(
    executor: Executor, hidden: torch.Tensor, targets: torch.Tensor, *, label_tokens: int
) -> tuple[float, torch.Tensor]:
    """The step's mean loss and its gradient with respect to the last hidden state, piece by piece.

    hidden: (batch, tokens, width) in host memory, like the gradient; targets: (batch, tokens) int64, already shifted.
    """
    normaliser = max(1, label_tokens)
    if executor.model.head_is_cut:
        return _in_pieces(executor, hidden, targets, normaliser=normaliser)
    return _whole(executor, hidden, targets, normaliser=normaliser)


def _whole(executor: Executor, hidden: torch.Tensor, targets: torch.Tensor, *, normaliser: int) -> tuple[float, torch.Tensor]:
    """One visit, forward and backward at once."""
    stage = executor.model.stages[-1].index
    visit, flat = executor.enter("head", stage)
    total = executor.sums.open(visit.owner if visit.owner is not None else stage)
    begin = time.monotonic()
    gradient, losses = executor.crossings.whole(tuple(hidden.shape), hidden.dtype), _Losses(executor.device.separate)
    batch = executor.micro_batches(hidden.shape[0])
    arriving = executor.inputs(partial(lambda rows: [hidden[rows], targets[rows]], rows) for rows in batch)
    leaving = executor.crossings.back()
    with executor.head.stubbed(), executor.installed(visit.owner, flat, trainable=True) as parameters:
        for rows in batch:
            part, part_targets = arriving.take()
            for cut in pieces(part.shape[0], part.shape[1], executor.plan.numerics.head_chunk_tokens):
                piece = part[cut].detach().requires_grad_(True)
                with torch.enable_grad():
                    piece_loss = executor.head.loss(piece, part_targets[cut], normaliser=normaliser)
                    executor.differentiate(piece_loss, None, [piece, *parameters], total)
                losses.add(piece_loss.detach())
                assert piece.grad is not None
                leaving.put(piece.grad, gradient[rows][cut])
                del piece, piece_loss
                executor.between()
    leaving.settle()
    loss = losses.sum()
    executor.check_loss(loss, stage)
    if not executor.model.tied_head:
        executor.sums.close(stage, total)
    executor.leave(visit, begin)
    return loss, gradient


class _Losses:
    """Of one piece after the other, added in order. Reading one waits for the device, so there they are read at the end."""

    def __init__(self, separate: bool) -> None:
        self._separate, self._sum = separate, 0.0
        self._unread: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor) -> None:
        self._unread.append(loss)
        if not self._separate:
            self.sum()

    def sum(self) -> float:
        for loss in self._unread:
            self._sum += float(loss)  # sync: on a device with memory of its own, the end of the head's visit
        self._unread.clear()
        return self._sum


def _in_pieces(
    executor: Executor, hidden: torch.Tensor, targets: torch.Tensor, *, normaliser: int
) -> tuple[float, torch.Tensor]:
    """Two passes over the pieces of the vocabulary, each piece's weights fetched once per pass for the whole batch."""
    heads = [stage.index for stage in executor.model.stages if stage.kind == "head"]
    end = executor.model.stages[heads[-1]].vocabulary
    if end is not None and int(targets.max()) >= end[1]:
        raise UsageError(f"the data holds a label outside of the model's vocabulary of {end[1]} tokens")
    tokens = TokenLoss.of(targets.to(executor.device.torch_device))
    executor.host_work.copied("inputs staged", targets)
    for stage in heads:
        _fold_piece(executor, stage, hidden, tokens)
    loss = tokens.mean(normaliser)
    executor.check_loss(loss, heads[-1])
    # Summed in float32 whatever the dtypes: a rounding per piece would make the result depend on their number.
    gradient = executor.crossings.whole(tuple(hidden.shape), torch.float32)
    is_result = gradient.dtype == hidden.dtype
    result = gradient if is_result else executor.crossings.whole(tuple(hidden.shape), hidden.dtype)
    for stage in reversed(heads):
        _differentiate_piece(executor, stage, hidden, tokens, gradient, result, normaliser=normaliser)
    return loss, result


def _fold_piece(executor: Executor, stage: int, hidden: torch.Tensor, tokens: TokenLoss) -> None:
    """The piece's logits of every token, into its loss."""
    visit, flat = executor.enter("logits", stage)
    begin = time.monotonic()
    with torch.no_grad(), executor.head.stubbed(), executor.installed(visit.owner, flat, trainable=False):
        parts = executor.micro_batches(hidden.shape[0])
        arriving = executor.inputs(partial(lambda rows: [hidden[rows]], rows) for rows in parts)
        for rows in parts:
            (batch,) = arriving.take()
            for part, piece in _chunks(executor, rows, batch):
                tokens.fold(part, executor.head.logits(piece), first=_first_row(executor, stage))
                executor.between()
    executor.leave(visit, begin)


def _differentiate_piece(
    executor: Executor,
    stage: int,
    hidden: torch.Tensor,
    tokens: TokenLoss,
    gradient: torch.Tensor,
    result: torch.Tensor,
    *,
    normaliser: int,
) -> None:
    """The piece's logits again, its own gradients, and its share of the hidden state's, added to `gradient` on the device: its
    rows go up, from the second piece on, and come down. The last of all puts the sum in `result` instead."""
    visit, flat = executor.enter("head", stage)
    assert visit.owner is not None
    total = executor.sums.open(visit.owner)
    begin = time.monotonic()
    begins, target = stage == executor.model.stages[-1].index, result if _first_row(executor, stage) == 0 else gradient
    batch = executor.micro_batches(hidden.shape[0])
    arriving = executor.inputs(
        partial(lambda rows: [hidden[rows]] if begins else [hidden[rows], gradient[rows]], rows) for rows in batch
    )
    leaving = executor.crossings.back()
    with executor.head.stubbed(), executor.installed(visit.owner, flat, trainable=True) as parameters:
        for rows in batch:
            states, *sums = arriving.take()
            sums = sums or [executor.crossings.begun(gradient[rows]).zero_()]
            for part, piece in _chunks(executor, rows, states):
                piece.requires_grad_(True)
                with torch.enable_grad():
                    logits = executor.head.logits(piece)
                slope = tokens.gradient(part, logits, first=_first_row(executor, stage), normaliser=normaliser)
                executor.differentiate(logits, slope, [piece, *parameters], total)
                del logits, slope
                assert piece.grad is not None
                _add(sums[0][part.cut], piece.grad)
                piece.grad = None
                executor.between()
            leaving.put(sums[0], target[rows])
            del states, sums, piece
    leaving.settle()
    if visit.rest:
        executor.sums.rest(visit.owner, total)
    else:
        executor.sums.close(visit.owner, total)
    executor.leave(visit, begin)


def _chunks(executor: Executor, rows: slice, batch: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
    """A micro-batch of the last hidden state, on the device, chunk by chunk: leaves of their own."""
    for cut in pieces(batch.shape[0], batch.shape[1], executor.plan.numerics.head_chunk_tokens):
        yield Part(rows, cut), batch[cut].detach()


def _add(sums: torch.Tensor, gradient: torch.Tensor) -> None:
    """Whole rows, or a part of one: by token."""
    flat = sums.view(-1, sums.shape[-1])
    add_in_pieces(flat, gradient.reshape(flat.shape))


def _first_row(executor: Executor, stage: int) -> int:
    vocabulary = executor.model.stages[stage].vocabulary
    assert vocabulary is not None
    return vocabulary[0]
