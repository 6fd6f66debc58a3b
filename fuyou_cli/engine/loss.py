"""Computes logits and loss for pieces of the last hidden state, through the model's own `ForCausalLM.forward`.

Logits never exist as a whole. The base model is stubbed to return the piece, so the family's own code does what it does to its
logits (scaling, soft-capping). A head cut along the vocabulary computes some columns at a time. `TokenLoss` folds them into the
loss of every token, and gives a second pass over the same columns their gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from ..spec.plan import MicroBatch
from .calls import replaced_forwards

IGNORED = -100


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Moves labels (B, S) one to the left: position t predicts token t + 1. The last position predicts nothing."""
    return nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def regular(x: torch.Tensor) -> torch.Tensor:
    """Returns a view of x (..., width) with the strides of a tensor of its own, or a copy where rows do not follow each other.

    torch folds rows and tokens into one product only where strides say so, even those of a single row. If not, it copies
    weights that have no gradient, for each row: bfloat16 on a CPU then takes many times as long.
    """
    return x.reshape(-1, x.shape[-1]).contiguous().view(x.shape)


class _OnlyPiece(BaseModelOutputWithPastAndCrossAttentions):  # type: ignore[misc]
    """What the stubbed base model returns. Everything else that a family's head passes on (caches, router logits) is
    None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class Head:
    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._piece: torch.Tensor | None = None

    @contextmanager
    def stubbed(self) -> Iterator[None]:
        """Makes the base model return the piece that `logits` or `loss` was given, inside the context, instead of computing."""

        def stub(*args: Any, **kwargs: Any) -> _OnlyPiece:
            return _OnlyPiece(last_hidden_state=self._piece)

        stubs: dict[nn.Module, Callable[..., object]] = {self.model.base_model: stub}
        decoder = self.model.get_decoder()
        if decoder is not None:
            stubs[decoder] = stub
        try:
            with replaced_forwards(stubs):
                yield
        finally:
            self._piece = None

    def loss(self, piece: torch.Tensor, targets: torch.Tensor, *, normaliser: int) -> torch.Tensor:
        """Computes the cross entropy of one piece, summed and divided by the step's label tokens.

        piece: (rows, tokens, hidden) on the device; targets: the same rows and tokens, already shifted.
        """
        logits = self.logits(piece)
        total = nn.functional.cross_entropy(
            logits.view(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=IGNORED, reduction="sum"
        )
        return total / normaliser

    def logits(self, piece: torch.Tensor) -> torch.Tensor:
        """Computes float32 logits (rows, tokens, columns) of the rows of its weights that the head holds now.

        piece: (rows, tokens, hidden) on the device. Only inside `stubbed`.
        """
        self._piece = regular(piece)
        ids = torch.zeros(piece.shape[:2], dtype=torch.long, device=piece.device)
        logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits.float()
        return logits


@dataclass(frozen=True, slots=True)
class TokenPart:
    """Describes some tokens of the step's batch: some rows of a micro-batch, and some tokens of these."""

    micro_batch: MicroBatch
    cut: tuple[slice, slice]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return self.micro_batch.of(whole)[self.cut]


@dataclass(slots=True)
class TokenLoss:
    """Holds, for every token of the step's batch, what the logits seen so far give (float32, on the device): their maximum, the
    sum of their exponentials relative to it, and the target's logit."""

    targets: torch.Tensor  # (batch, tokens) int64, shifted
    maximum: torch.Tensor
    total: torch.Tensor
    target: torch.Tensor

    @classmethod
    def of(cls, targets: torch.Tensor) -> TokenLoss:
        """Returns one that has seen no logits yet. targets: (batch, tokens) on the device."""
        zeros = torch.zeros_like(targets, dtype=torch.float32)
        return cls(targets=targets, maximum=zeros - torch.inf, total=zeros, target=zeros.clone())

    def seen(self) -> torch.Tensor:
        """Returns what was seen of every token: (batch, tokens, 3) float32."""
        return torch.stack([self.maximum, self.total, self.target], -1)

    def of_micro_batch(self, part: MicroBatch) -> TokenLoss:
        """Returns a view of the tokens of a micro-batch."""
        return TokenLoss(*(part.of(value) for value in (self.targets, self.maximum, self.total, self.target)))

    def take_in(self, seen: torch.Tensor) -> None:
        """Goes on from what another one has `seen` of the same tokens."""
        for value, found in zip((self.maximum, self.total, self.target), seen.unbind(-1), strict=True):
            value.copy_(found)

    def fold(self, part: TokenPart, logits: torch.Tensor, *, first: int) -> None:
        """Takes in columns [first, first + logits.shape[-1]) of the logits of some tokens. Overwrites `logits`."""
        maximum, total = part.of(self.maximum), part.of(self.total)
        column, inside = _columns(part.of(self.targets), first, logits.shape[-1])
        target_logits = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1)
        target = part.of(self.target)
        target.copy_(torch.where(inside, target_logits, target))
        higher = torch.maximum(maximum, logits.amax(-1))
        total.mul_(maximum.sub_(higher).exp_()).add_(logits.sub_(higher.unsqueeze(-1)).exp_().sum(-1))
        maximum.copy_(higher)

    def losses(self) -> torch.Tensor:
        """Returns the losses of all label tokens (1-D), once every column was seen."""
        losses = self.maximum + self.total.log() - self.target
        return losses[self.targets != IGNORED]

    def of_part(self, part: MicroBatch) -> float:
        """Returns the sum of a micro-batch's losses, once every column was seen. Reads the device."""
        losses = part.of(self.maximum) + part.of(self.total).log() - part.of(self.target)
        return float(losses[part.of(self.targets) != IGNORED].sum(dtype=torch.float64))

    def by_token(self) -> torch.Tensor:
        """Returns the loss of every token (float64, in host memory), 0 where it is no label. Every column was seen."""
        losses = self.maximum + self.total.log() - self.target
        return losses.masked_fill(self.targets == IGNORED, 0.0).double().cpu()  # sync: at the end of a pass over the model

    def likeliest_by_token(self) -> torch.Tensor:
        """Tells for every token (in host memory) that its label is the likeliest one, or that it has none, once every column
        has been seen."""
        return ((self.target >= self.maximum) | (self.targets == IGNORED)).cpu()

    def gradient(self, part: TokenPart, logits: torch.Tensor, *, first: int, normaliser: int) -> torch.Tensor:
        """Returns the gradient of the step's mean loss with respect to these columns of the logits of some tokens. Does not
        change the logits."""
        targets = part.of(self.targets)
        maximum, total = part.of(self.maximum), part.of(self.total)
        gradient = logits.detach().sub(maximum.unsqueeze(-1)).exp_().div_(total.unsqueeze(-1))
        column, inside = _columns(targets, first, logits.shape[-1])
        column = column.unsqueeze(-1)
        gradient.scatter_(-1, column, gradient.gather(-1, column).sub_(inside.unsqueeze(-1).to(gradient.dtype)))
        return gradient.div_(normaliser).masked_fill_((targets == IGNORED).unsqueeze(-1), 0.0)


def mean(losses: list[torch.Tensor], normaliser: int) -> float:
    """Returns the sum of the losses of a step's label tokens, in their order and as if they came at once, over `normaliser`.
    Reads the device."""
    of_all = losses[0] if len(losses) == 1 else torch.cat(losses)
    return float(of_all.sum(dtype=torch.float64)) / normaliser


def _columns(targets: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns where each target is among `count` columns from `first` on (any column if it is not there), and whether it is
    there."""
    column = targets - first
    return column.clamp(0, count - 1), (column >= 0) & (column < count)


def pieces(rows: int, tokens: int, chunk: int) -> Iterator[tuple[slice, slice]]:
    """Cuts one micro-batch (rows, tokens): whole if `chunk` is 0, otherwise row by row in runs of at most `chunk` tokens."""
    if chunk == 0:
        yield slice(0, rows), slice(0, tokens)
        return
    rows_at_once = max(1, chunk // tokens)
    for row in range(0, rows, rows_at_once):
        for begin in range(0, tokens, chunk):
            yield slice(row, min(row + rows_at_once, rows)), slice(begin, min(begin + chunk, tokens))
