"""Computes visits of embeddings: row by row if one is a lookup, and piece by piece if it is cut along the vocabulary."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from ...core.errors import UsageError
from ...spec.micro_batch import whole_rows
from ..activations import Activations
from ..anatomy import Installed
from ..crossings import Gathering, Leaving, clear_padding
from ..gradients import GradientSum
from ..lookup import OfMicroBatches, StepIds, add_rows, is_lookup, is_plain, padding_at, scales_rows
from ..skeleton import TORCH_DTYPE
from ..streamed import Call
from ..visits import Visits
from .block import BlockPasses


class EmbeddingPasses(BlockPasses):
    """Computes stages whose input is ids, which need no gradient."""

    def __init__(self, visits: Visits, activations: Sequence[Activations], tokens: torch.nn.Module) -> None:
        """Finds what each embedding is. `tokens`: the model's embedding of token ids."""
        super().__init__(visits, activations)
        modules = [stage.module if stage.kind == "embedding" else None for stage in visits.stages]
        # Tables that are only looked up, and perhaps scaled, can be used by micro-batch. This is tried before their forwards
        # are replaced.
        self._lookups = {i for i, m in enumerate(modules) if is_plain(m) or (is_lookup(m) and scales_rows(m))}
        cut = [i for i, stage in enumerate(visits.stages) if stage.kind == "embedding" and stage.vocabulary is not None]
        self._pieces: dict[int | None, list[int]] = (
            {cut[0]: cut} if cut else {}
        )  # keyed by the stage as which the embedding's forward is called
        # The stage whose rows are looked up by token.
        self._table = next((i for i, m in enumerate(modules) if m is tokens), None)
        self._more = any(m is not None and m is not tokens for m in modules)  # there are other tables, probably of positions
        self._given: list[StepIds] = []  # for the ids that the step's forward is given

    def placed(self, ids: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """Returns a step's ids and positions (in host memory) where the model's forward wants them. Nothing is submitted yet.
        Raises UsageError for an id that no row has."""
        placed = [self.visits.crossings.placed(value) for value in (ids, positions)]
        self._given = [] if self._table is None else [self._looked_up(self._table, ids)]
        if self._table is not None and self.visits.moves.rows.stages:
            self.visits.look_up({self._table + place: rows for place, rows in enumerate(self._given[0].rows())})
        if self._more:
            self._given.append(self._looked_up(None, positions))
        for given, value in zip(self._given, placed, strict=False):
            given.are(value)
        return placed

    def _looked_up(self, table: int | None, ids: torch.Tensor) -> StepIds:
        """Finds what is looked up in the table of a stage, whole or cut. Returns None for a whole table that is not a lookup.
        ids: in host memory."""
        pieces = [self.visits.stages[piece].rows for piece in self._pieces.get(table, ())]
        if table is not None:
            end = pieces[-1][1] if pieces else self._module(table).num_embeddings
            if int(ids.min()) < 0 or int(ids.max()) >= end:
                raise UsageError(f"the data holds a token id outside of the model's vocabulary of {end} tokens")
        micro_batches = self.visits.micro_batches(ids)
        begins = [micro_batch.first * ids.shape[1] for micro_batch in micro_batches]
        parts = [micro_batch.of(ids) for micro_batch in micro_batches]
        return StepIds(parts, pieces, self.visits.crossings.told, begins=[*begins, ids.numel()])

    def _ids_of(self, call: Call, ids: torch.Tensor) -> OfMicroBatches:
        """Returns what is known of the ids of a call."""
        known = next((part for given in self._given if (part := given.part(ids)) is not None), None)
        if known is None:
            return self._looked_up(call.stage, ids.cpu()).looked  # sync: the model's own code made these ids
        return known

    def forward(self, call: Call, x: torch.Tensor) -> torch.Tensor:
        """Passes ids to the visits. x: (batch, tokens) int64, where the batch is."""
        if call.stage in self.visits.moves.rows.stages and self._given[0].part(x) is None:
            self.visits.moves.rows.expect_others()
        if call.stage not in self._pieces:
            return super().forward(call, x)
        return self._forward_in_pieces(self._pieces[call.stage], call, x)

    def backward(self, call: Call, ids: torch.Tensor | None, grad_y: torch.Tensor) -> None:
        assert ids is not None
        if call.stage in self._pieces:
            self._backward_in_pieces(self._pieces[call.stage], call, ids, grad_y)
        else:
            super().backward(call, ids, grad_y)

    # ---- whole -----------------------------------------------------------------------------------------------------

    def computed(self, call: Call, x: torch.Tensor, parameters: Installed, *, stash: bool) -> torch.Tensor:
        """Computes a visit. All rows may share the ids. If memory is the host's, one lookup does all."""
        visits = self.visits
        if visits.device.separate and call.stage in self._lookups:
            return super().computed(call, x, parameters, stash=stash)
        y = Gathering(visits.crossings, x.shape)
        (ids,) = visits.inputs([lambda: [x]]).take()
        visits.seed(call.stage, 0)
        y.put(whole_rows(*x.shape[:2]), call.run(ids))
        return y.settled()

    def differentiated(
        self, call: Call, x: list[torch.Tensor], grad_y: torch.Tensor, flat: torch.Tensor | None, total: GradientSum | None
    ) -> None:
        """Differentiates a visit. x: all ids (batch, tokens); grad_y: (batch, tokens, width)."""
        visits, (ids,) = self.visits, x
        assert total is not None
        if call.stage in self._lookups and grad_y.shape[0] == ids.shape[0]:
            looked = self._ids_of(call, ids)
            for number, (chosen, grad) in enumerate(self._by_token(ids, grad_y)):
                add_rows(self._module(call.stage), call.run, looked[number][0], chosen, grad, total, first=0)
                visits.between()
            return
        whole_ids, whole_grad = visits.inputs([lambda: [ids, grad_y]]).take()
        if flat is None:  # with a deferred update no weights are here; a lookup's gradient does not depend on their values
            assert not visits.model.stages[call.stage].weights_in_backward
            params = visits.model.stages[call.stage].params
            flat = torch.zeros(params, dtype=TORCH_DTYPE[visits.model.compute_dtype], device=whole_ids.device)
        with torch.enable_grad(), visits.learning(call.stage, flat, total) as parameters:
            visits.differentiate(call.run(whole_ids), whole_grad, [*parameters])

    # ---- in pieces -------------------------------------------------------------------------------------------------

    def _forward_in_pieces(self, pieces: Sequence[int], call: Call, ids: torch.Tensor) -> torch.Tensor:
        """Puts each piece's rows where its ids are. The result equals that of a whole table, bit for bit."""
        looked, y = self._ids_of(call, ids), None
        for stage in pieces:
            y = self._look_up(stage, call, ids, looked, y)
        assert y is not None
        return y

    def _look_up(
        self, stage: int, call: Call, ids: torch.Tensor, looked: OfMicroBatches, y: torch.Tensor | None
    ) -> torch.Tensor:
        """Puts the rows of one piece in their places in `y` on the device. If there are pieces before, their rows go up
        first."""
        visits = self.visits
        visit, flat = visits.enter("forward", stage)
        begin = time.monotonic()
        module, before, (first, _) = self._module(call.stage), y, visits.stages[stage].rows
        micro_batches = visits.micro_batches(ids)
        sources = (ids,) if before is None else (ids, before)
        arriving = visits.inputs(
            partial(lambda of: [of(source).contiguous() for source in sources], each.of) for each in micro_batches
        )
        leaving = Leaving(visits.crossings)
        with torch.no_grad(), padding_at(module, None), visits.installed(stage, flat):
            for number, micro_batch in enumerate(micro_batches):
                part_ids, *found = arriving.take()
                here = looked[number][stage - call.stage].here
                assert here is not None
                looked_up = call.run(part_ids.reshape(-1)[here] - first)
                if y is None:
                    y = visits.crossings.batches.lend((*ids.shape, looked_up.shape[-1]), looked_up.dtype)
                clear_padding(y, micro_batch)
                found = found or [visits.crossings.begun(micro_batch.of(y))]
                found[0].view(-1, y.shape[-1]).index_copy_(0, here, looked_up)
                leaving.put(found[0], micro_batch.of(y))
                del found, looked_up
                visits.between()
        leaving.settle()
        visits.leave(visit, begin)
        assert y is not None
        return y

    def _backward_in_pieces(self, pieces: Sequence[int], call: Call, ids: torch.Tensor, grad_y: torch.Tensor) -> None:
        """Sums every piece's gradients by rows. ids: (batch, tokens) int64; grad_y: (batch, tokens, width)."""
        assert grad_y.shape[: ids.dim()] == ids.shape, (grad_y.shape, ids.shape)
        visits, looked = self.visits, self._ids_of(call, ids)
        for stage in reversed(pieces):
            visit, _ = visits.enter("backward", stage)
            total = visits.sums.open(stage, resume=visit.resume)
            begin, (first, _) = time.monotonic(), visits.stages[stage].rows
            assert total is not None
            for number, (chosen, grad) in enumerate(self._by_token(ids, grad_y)):
                of_piece = looked[number][stage - call.stage]
                if of_piece.distinct.numel():
                    add_rows(self._module(call.stage), call.run, of_piece, chosen, grad, total, first=first)
                visits.between()
            visits.sums.end(visit, stage, total)
            visits.leave(visit, begin)

    def _by_token(self, ids: torch.Tensor, grad_y: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Returns (tokens,) and (tokens, width) for each micro-batch, on the device."""
        micro_batches, width = self.visits.micro_batches(ids), grad_y.shape[-1]
        arriving = self.visits.inputs(
            partial(lambda of: [of(ids).reshape(-1), of(grad_y).reshape(-1, width)], each.of) for each in micro_batches
        )
        for _ in micro_batches:
            yield arriving.take()

    def _module(self, stage: int) -> torch.nn.Embedding:
        module = self.visits.stages[stage].module
        assert isinstance(module, torch.nn.Embedding)
        return module
