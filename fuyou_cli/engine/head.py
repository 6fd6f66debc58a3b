"""Computes the head's visits of a step: the loss, its gradient with respect to the last hidden state, and the head's own
gradients.

A whole head is visited once, forward and backward together. A head cut along the vocabulary has two passes: the loss needs
every column of the logits before the gradient of any is known. Other ranks may have some of its pieces (`planner/ring`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from ..core.errors import UsageError
from ..planner.schedule import Visit
from ..spec.plan import MicroBatch
from .crossings import Leaving, clear_padding
from .devices.base import Squares
from .gradients import add_in_pieces
from .loss import Head, TokenLoss, TokenPart, mean, pieces
from .visits import Visits, backpropagate


class HeadPasses:
    """Computes the loss and differentiates it. Calls `check_loss` with the step's loss and its stage, for a whole head in
    `settle`, which comes before any update.

    `loss`: the step's mean, once its last sweep has passed through the head and `settle` was called. `of_all`: gives, for
    losses of pieces or micro-batches here, those of all replicas, in order.
    """

    of_all: Callable[[list[float]], list[float]] = staticmethod(lambda own: own)

    def __init__(self, visits: Visits, model: PreTrainedModel, check_loss: Callable[[float, int], None]) -> None:
        self.visits, self.head, self._check_loss = visits, Head(model), check_loss
        self.stages = [stage.index for stage in visits.model.stages if stage.kind == "head" and not stage.away]
        self.loss, self._normaliser = 0.0, 1
        self._losses: list[torch.Tensor] = []  # losses of label tokens, one tensor per sweep through a cut head so far
        self._passed: _Passed | None = None  # of a cut head whose backward runs once more
        self._awaited: tuple[Squares, Visit] | None = None  # losses of pieces on their way from the device, and their visit

    def begin_step(self, label_tokens: int) -> None:
        self.loss, self._normaliser = 0.0, max(1, label_tokens)
        self._losses.clear()
        self._awaited = self._passed = None

    def run(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the step's mean loss with respect to a sweep's last hidden state; zeros, which nobody reads,
        where another rank gets it.

        hidden: (rows, tokens, width), in host memory or on the device; the gradient is in the same place. targets: (rows,
        tokens) int64, already shifted, where `place_targets` puts them.
        """
        if not self.stages:
            return _unread(hidden)
        compute = self._run_in_pieces if self.visits.model.head_is_cut else self._run_whole
        return compute(hidden, targets, normaliser=self._normaliser)

    def settle(self) -> None:
        """Adds the losses of the last visit of a whole head, in order, and checks the step's loss. The launching thread would
        lose its lead over a GPU if it waited for them in the visit."""
        if self._awaited is None:
            return
        (losses, visit), self._awaited = self._awaited, None
        for loss in self.of_all(losses.result()):
            self.loss += loss
        if visit.is_final:
            self._check_loss(self.loss, visit.stage)

    def place_targets(self, targets: torch.Tensor) -> torch.Tensor:
        """Returns a step's host targets where `run` wants them. Raises UsageError for a target that no piece has."""
        return self.upload_targets(targets) if self.visits.model.head_is_cut else self.visits.crossings.beside_batch(targets)

    def upload_targets(self, targets: torch.Tensor) -> torch.Tensor:
        """Returns targets on the device. Raises UsageError for a target that no piece has."""
        ends = [stage.vocabulary[1] for stage in self.visits.stages if stage.kind == "head" and stage.vocabulary is not None]
        if ends and int(targets.max()) >= max(ends):
            raise UsageError(f"the data holds a label outside of the model's vocabulary of {max(ends)} tokens")
        return self.visits.crossings.upload_now(targets)

    # ---- the loss alone --------------------------------------------------------------------------------------------

    def token_losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> _Passed:
        """Visits the head, or each of its pieces, without gradients. The rank of the last piece has each token's loss then.

        hidden: (rows, tokens, width), where the batch is; targets: (rows, tokens) int64, shifted, on the device.
        """
        passed = _Passed(TokenLoss.of(targets), hidden)
        for stage in self.stages:
            first, _ = self.visits.model.stages[stage].vocabulary or (0, 0)
            self._visit_piece(stage, passed, partial(passed.tokens.fold, first=first))
        return passed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Visits the head, or each of its pieces, for one token of each row: (rows, vocabulary) float32 logits, on the device.

        hidden: (rows, 1, width), anywhere.
        """
        columns: list[torch.Tensor] = []
        passed = _Passed(TokenLoss.of(torch.zeros(hidden.shape[:2], dtype=torch.int64)), hidden)
        for stage in self.stages:
            parts: list[torch.Tensor] = []
            self._visit_piece(stage, passed, partial(lambda found, _, logits: found.append(logits.squeeze(1)), parts))
            columns.append(torch.cat(parts))
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1)

    # ---- whole -----------------------------------------------------------------------------------------------------

    def _run_whole(self, hidden: torch.Tensor, targets: torch.Tensor, *, normaliser: int) -> torch.Tensor:
        visits, head = self.visits, self.head
        stage = visits.model.stages[-1].index
        visit, flat = visits.enter("head", stage)
        total = visits.sums.open(visit.owner if visit.owner is not None else stage, resume=visit.resume)
        gradient = visits.crossings.batches.lend(tuple(hidden.shape), hidden.dtype)
        losses = list[torch.Tensor]()
        batch = visits.micro_batches(hidden)
        arriving = visits.inputs(partial(lambda of: [of(hidden).contiguous(), of(targets)], each.of) for each in batch)
        leaving = Leaving(visits.crossings)
        with head.stubbed(), visits.learning(visit.owner, flat, total) as parameters:
            for micro_batch in batch:
                clear_padding(gradient, micro_batch)
                part, part_targets = arriving.take()
                for cut in pieces(part.shape[0], part.shape[1], visits.plan.numerics.head_chunk_tokens):
                    piece = part[cut].detach().requires_grad_(True)
                    with torch.enable_grad():
                        piece_loss = head.loss(piece, part_targets[cut], normaliser=normaliser)
                        backpropagate(piece_loss, None, [piece, *parameters])
                    losses.append(piece_loss.detach())
                    assert piece.grad is not None
                    leaving.put(piece.grad, micro_batch.of(gradient)[cut])
                    del piece, piece_loss
                    visits.between()
        leaving.settle()
        self.settle()  # an earlier sweep's
        if not visit.again:
            self._awaited = visits.device.numbers(torch.stack(losses)), visit
        if not visits.device.separate:
            self.settle()
        if not visits.model.tied_head:
            visits.sums.end(visit, stage, total)
        visits.leave(visit)
        return gradient

    # ---- in pieces -------------------------------------------------------------------------------------------------

    def _run_in_pieces(self, hidden: torch.Tensor, targets: torch.Tensor, *, normaliser: int) -> torch.Tensor:
        """Makes two passes over the pieces of the vocabulary. Each piece's weights are fetched once per pass. A second backward
        makes only the second pass again."""
        visits = self.visits
        passed, self._passed = self._passed, None
        if passed is None:
            passed = self._first_pass(hidden, targets, normaliser=normaliser)
            self._passed = passed if visits.plan.norm_first else None
        # Always summed in float32: rounding after each piece would make the result depend on the number of pieces.
        shape, dtype = tuple(passed.hidden.shape), passed.hidden.dtype
        gradient = result = visits.crossings.batches.lend(shape, torch.float32)
        has_first = visits.stages[self.stages[0]].rows[0] == 0
        if has_first and dtype != gradient.dtype:
            result = visits.crossings.batches.lend(shape, dtype)
        for stage in reversed(self.stages):
            target = result if visits.stages[stage].rows[0] == 0 else gradient  # the last piece has the complete sum
            self._differentiate_piece(stage, passed, gradient, target, normaliser=normaliser)
        return result if has_first else _unread(hidden)

    def _first_pass(self, hidden: torch.Tensor, targets: torch.Tensor, *, normaliser: int) -> _Passed:
        """Makes the first pass, and notes the step's loss where the last piece is."""
        passed, last = self.token_losses(hidden, targets), self.visits.model.stages[-1]
        tokens = passed.tokens
        if last.away:
            return passed
        if self.visits.model.head_is_shared:
            passed.seen = tokens.seen().cpu()  # sync: the loss is read as well
        if self.visits.plan.numerics.lanes > 1:  # by micro-batch: replicas have some of the tokens
            losses = self.of_all([tokens.of_part(part) for part in self.visits.micro_batches(targets)])
            self.loss = sum(losses) / normaliser
            self._check_loss(self.loss, last.index)
            return passed
        self._losses.append(tokens.losses())
        if passed.is_final:
            self.loss = mean(self._losses, normaliser)
            self._check_loss(self.loss, last.index)
        return passed

    def _visit_piece(self, stage: int, passed: _Passed, take: Callable[[TokenPart, torch.Tensor], None]) -> None:
        """Hands the piece's logits to `take`, chunk by chunk. Where other ranks have pieces, what was seen of a micro-batch's
        tokens comes before and goes on behind it, with the hidden state for a rank that has seen none of it."""
        visits, tokens = self.visits, passed.tokens
        came = () if visits.link is None else visits.link.awaited_by_piece()
        passed.hidden = hidden = came[0] if len(came) > 1 else passed.hidden
        with visits.forward(stage, phase="logits") as (visit, _), self.head.stubbed():
            micro_batches, gives, leaving = visits.micro_batches(hidden), visits.gives(), Leaving(visits.crossings)
            arriving = visits.inputs(partial(visits.parts, each, [hidden, *came[-1:]]) for each in micro_batches)
            for micro_batch in micro_batches:
                batch, *seen = arriving.take()
                if seen:
                    tokens.of_micro_batch(micro_batch).take_in(seen[0])
                for part, piece in self._chunks(micro_batch, batch):
                    take(part, self.head.logits(piece))
                    visits.between()
                if gives is not None:
                    own, more = tokens.of_micro_batch(micro_batch).seen(), [micro_batch.of(hidden)] * gives.has_hidden
                    leaving.put(own, torch.empty(own.shape, dtype=own.dtype), partial(gives, *more))
            leaving.settle()
        passed.is_final = visit.is_final

    def _differentiate_piece(
        self, stage: int, passed: _Passed, gradient: torch.Tensor, target: torch.Tensor, *, normaliser: int
    ) -> None:
        """Computes the piece's logits again, its own gradients, and its share of the hidden state's gradient. Adds the share to
        `gradient` on the device. From the second piece on, rows of `gradient` go up first; they come down to `target`. They may
        come from another rank, and go on to one, each with what was seen of all columns."""
        visits, first = self.visits, self.visits.stages[stage].rows[0]
        hidden, tokens = passed.hidden, passed.tokens
        came = () if visits.link is None else visits.link.awaited_by_piece(gradient)
        passed.seen = came[0] if came else passed.seen
        visit, flat = visits.enter("head", stage)
        assert visit.owner is not None
        total = visits.sums.open(visit.owner, resume=visit.resume)
        is_first = stage == visits.model.stages[-1].index
        batch = visits.micro_batches(hidden)
        sources = [hidden] if is_first else [hidden, gradient, *came[:1]]
        arriving = visits.inputs(partial(visits.parts, each, sources) for each in batch)
        leaving, gives = Leaving(visits.crossings), visits.gives()
        with self.head.stubbed(), visits.learning(visit.owner, flat, total) as parameters:
            for micro_batch in batch:
                states, *sums = arriving.take()
                if came:
                    tokens.of_micro_batch(micro_batch).take_in(sums.pop())
                sums = sums or [visits.crossings.room_for(micro_batch.of(gradient)).zero_()]
                for part, piece in self._chunks(micro_batch, states):
                    piece.requires_grad_(True)
                    with torch.enable_grad():
                        logits = self.head.logits(piece)
                    slope = tokens.gradient(part, logits, first=first, normaliser=normaliser)
                    backpropagate(logits, slope, [piece, *parameters])
                    del logits, slope
                    assert piece.grad is not None
                    _add(sums[0][part.cut], piece.grad)
                    piece.grad = None
                    visits.between()
                clear_padding(target, micro_batch)
                then = None
                if gives is not None:
                    assert passed.seen is not None
                    then = partial(gives, micro_batch.of(passed.seen))
                leaving.put(sums[0], micro_batch.of(target), then)
                del states, sums, piece
        leaving.settle()
        visits.sums.end(visit, visit.owner, total)
        visits.leave(visit)

    def _chunks(self, micro_batch: MicroBatch, batch: torch.Tensor) -> Iterator[tuple[TokenPart, torch.Tensor]]:
        """Returns a micro-batch of the last hidden state on the device, chunk by chunk, each chunk a leaf."""
        for cut in pieces(batch.shape[0], batch.shape[1], self.visits.plan.numerics.head_chunk_tokens):
            yield TokenPart(micro_batch, cut), batch[cut].detach()


@dataclass(slots=True)
class _Passed:
    """Holds what the first pass over the pieces leaves for the second. `seen`: of the tokens, in host memory, where other ranks
    have pieces."""

    tokens: TokenLoss
    hidden: torch.Tensor
    is_final: bool = True  # the pass was in the step's last sweep
    seen: torch.Tensor | None = None


def _unread(hidden: torch.Tensor) -> torch.Tensor:
    """Returns zeros in the shape of the hidden state, which take no memory."""
    return torch.zeros_like(hidden[:1, :1, :1]).expand_as(hidden)


def _add(sums: torch.Tensor, gradient: torch.Tensor) -> None:
    """Adds the gradient of a piece (rows, tokens, width) to `sums`, flattened over tokens."""
    flat = sums.view(-1, sums.shape[-1])
    add_in_pieces(flat, gradient.reshape(flat.shape))
