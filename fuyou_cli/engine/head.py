"""Computes the head's visits of a step: the loss, its gradient with respect to the last hidden state, and the head's own
gradients.

A whole head is visited once, forward and backward together. A head cut along the vocabulary has two passes: the loss needs
every column of the logits before the gradient of any is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        self.loss, self._normaliser = 0.0, 1
        self._losses: list[torch.Tensor] = []  # losses of label tokens, one tensor per sweep through a cut head so far
        self._tokens: TokenLoss | None = None  # of a cut head whose backward runs once more
        self._awaited: tuple[Squares, Visit] | None = None  # losses of pieces on their way from the device, and their visit

    def begin_step(self, label_tokens: int) -> None:
        self.loss, self._normaliser = 0.0, max(1, label_tokens)
        self._losses.clear()
        self._awaited = self._tokens = None

    def run(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the step's mean loss with respect to a sweep's last hidden state.

        hidden: (rows, tokens, width), in host memory or on the device; the gradient is in the same place. targets: (rows,
        tokens) int64, already shifted, where `place_targets` puts them.
        """
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

    def token_losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[TokenLoss, bool]:
        """Visits the head, or each of its pieces, without gradients. Returns each token's loss, and whether the visits were in
        the last sweep.

        hidden: (rows, tokens, width), where the batch is; targets: (rows, tokens) int64, shifted, on the device.
        """
        tokens, is_final = TokenLoss.of(targets), True
        for stage in self.visits.model.stages:
            if stage.kind == "head":
                first = stage.vocabulary[0] if stage.vocabulary else 0
                fold = partial(tokens.fold, first=first)
                is_final = self._visit_piece(stage.index, hidden, fold).is_final
        return tokens, is_final

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Visits the head, or each of its pieces, for one token of each row: (rows, vocabulary) float32 logits, on the device.

        hidden: (rows, 1, width), anywhere.
        """
        columns: list[torch.Tensor] = []
        for stage in self.visits.model.stages:
            if stage.kind == "head":
                parts: list[torch.Tensor] = []
                self._visit_piece(stage.index, hidden, partial(lambda found, _, logits: found.append(logits.squeeze(1)), parts))
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
        heads = [stage.index for stage in visits.model.stages if stage.kind == "head"]
        tokens, self._tokens = self._tokens, None
        if tokens is None:
            tokens = self._first_pass(hidden, targets, heads[-1], normaliser=normaliser)
            self._tokens = tokens if visits.plan.norm_first else None
        # Always summed in float32: rounding after each piece would make the result depend on the number of pieces.
        gradient = visits.crossings.batches.lend(tuple(hidden.shape), torch.float32)
        is_result = gradient.dtype == hidden.dtype
        result = gradient if is_result else visits.crossings.batches.lend(tuple(hidden.shape), hidden.dtype)
        for stage in reversed(heads):
            target = result if visits.stages[stage].rows[0] == 0 else gradient  # the last piece has the complete sum
            self._differentiate_piece(stage, hidden, tokens, gradient, target, normaliser=normaliser)
        return result

    def _first_pass(self, hidden: torch.Tensor, targets: torch.Tensor, last: int, *, normaliser: int) -> TokenLoss:
        """Returns each token's loss, and notes the step's."""
        tokens, is_final = self.token_losses(hidden, targets)
        if self.visits.plan.numerics.lanes > 1:  # by micro-batch: replicas have some of the tokens
            losses = self.of_all([tokens.of_part(part) for part in self.visits.micro_batches(targets)])
            self.loss = sum(losses) / normaliser
            self._check_loss(self.loss, last)
            return tokens
        self._losses.append(tokens.losses())
        if is_final:
            self.loss = mean(self._losses, normaliser)
            self._check_loss(self.loss, last)
        return tokens

    def _visit_piece(self, stage: int, hidden: torch.Tensor, take: Callable[[TokenPart, torch.Tensor], None]) -> Visit:
        """Hands the piece's logits to `take`, chunk by chunk. Returns the visit."""
        visits = self.visits
        with visits.forward(stage, phase="logits") as (visit, _), self.head.stubbed():
            micro_batches = visits.micro_batches(hidden)
            arriving = visits.inputs(partial(lambda of: [of(hidden).contiguous()], each.of) for each in micro_batches)
            for micro_batch in micro_batches:
                (batch,) = arriving.take()
                for part, piece in self._chunks(micro_batch, batch):
                    take(part, self.head.logits(piece))
                    visits.between()
        return visit

    def _differentiate_piece(
        self, stage: int, hidden: torch.Tensor, tokens: TokenLoss, gradient: torch.Tensor, target: torch.Tensor,
        *, normaliser: int,
    ) -> None:  # fmt: skip
        """Computes the piece's logits again, its own gradients, and its share of the hidden state's gradient. Adds the share to
        `gradient` on the device. From the second piece on, rows of `gradient` go up first; they come down to `target`."""
        visits, first = self.visits, self.visits.stages[stage].rows[0]
        visit, flat = visits.enter("head", stage)
        assert visit.owner is not None
        total = visits.sums.open(visit.owner, resume=visit.resume)
        is_first = stage == visits.model.stages[-1].index
        batch = visits.micro_batches(hidden)
        sources = (hidden,) if is_first else (hidden, gradient)
        arriving = visits.inputs(partial(lambda of: [of(source).contiguous() for source in sources], each.of) for each in batch)
        leaving = Leaving(visits.crossings)
        with self.head.stubbed(), visits.learning(visit.owner, flat, total) as parameters:
            for micro_batch in batch:
                states, *sums = arriving.take()
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
                leaving.put(sums[0], micro_batch.of(target))
                del states, sums, piece
        leaving.settle()
        visits.sums.end(visit, visit.owner, total)
        visits.leave(visit)

    def _chunks(self, micro_batch: MicroBatch, batch: torch.Tensor) -> Iterator[tuple[TokenPart, torch.Tensor]]:
        """Returns a micro-batch of the last hidden state on the device, chunk by chunk, each chunk a leaf."""
        for cut in pieces(batch.shape[0], batch.shape[1], self.visits.plan.numerics.head_chunk_tokens):
            yield TokenPart(micro_batch, cut), batch[cut].detach()


def _add(sums: torch.Tensor, gradient: torch.Tensor) -> None:
    """Adds the gradient of a piece (rows, tokens, width) to `sums`, flattened over tokens."""
    flat = sums.view(-1, sums.shape[-1])
    add_in_pieces(flat, gradient.reshape(flat.shape))
