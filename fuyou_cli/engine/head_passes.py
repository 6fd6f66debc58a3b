"""The head's visits of a step: the loss, its gradient with respect to the last hidden state, and the head's own gradients."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from .head import pieces

if TYPE_CHECKING:
    from .executor import Executor


def run_head(
    executor: Executor, hidden: torch.Tensor, targets: torch.Tensor, *, label_tokens: int
) -> tuple[float, torch.Tensor]:
    """The step's mean loss and its gradient with respect to the last hidden state, piece by piece.

    hidden: (batch, tokens, width) in host memory, like the gradient; targets: (batch, tokens) int64, already shifted.
    """
    return _whole(executor, hidden, targets, normaliser=max(1, label_tokens))


def _whole(
    executor: Executor, hidden: torch.Tensor, targets: torch.Tensor, *, normaliser: int
) -> tuple[float, torch.Tensor]:
    """One visit, forward and backward at once."""
    stage = executor.model.stages[-1].index
    device = executor.device.torch_device
    visit, flat = executor.enter("head", stage)
    total = executor.sums.open(visit.owner if visit.owner is not None else stage)
    executor.settle()
    begin = time.monotonic()
    gradient = torch.empty_like(hidden)
    loss = 0.0
    with executor.head.stubbed(), executor.installed(visit.owner, flat, trainable=True) as parameters:
        for rows in executor.micro_batches(hidden.shape[0]):
            part, part_targets = hidden[rows].to(device), targets[rows].to(device)
            for cut in pieces(part.shape[0], part.shape[1], executor.plan.numerics.head_chunk_tokens):
                piece = part[cut].detach().requires_grad_(True)
                with torch.enable_grad():
                    piece_loss = executor.head.loss(piece, part_targets[cut], normaliser=normaliser)
                    executor.differentiate(piece_loss, None, [piece, *parameters], total)
                loss += float(piece_loss.detach())  # sync: reads the loss of one piece
                gradient[rows][cut] = piece.grad
                del piece, piece_loss
                executor.between()
    if not executor.model.tied_head:
        executor.sums.close(stage, total)
    executor.leave(visit, begin)
    return loss, gradient
