"""Computes visits micro-batch by micro-batch, forward, and backward from what forward kept: of blocks, norms and projections
(`BlockPasses`), of blocks whose experts are stages of their own (`RangedPasses`) and of embeddings (`EmbeddingPasses`).
The head is computed by `head`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.errors import UsageError
from ..spec.plan import MicroBatch, whole_rows
from .activations import Activations, Forward
from .anatomy import Installed
from .crossings import Gathering, Leaving, clear_padding
from .cutting import (
    OfMicroBatches,
    Sent,
    StepIds,
    add_outputs,
    add_rows,
    differentiate,
    is_lookup,
    is_plain,
    padding_at,
    scales_rows,
)
from .gradients import GradientSum
from .routing import Roots, RoutedVisit, Routing
from .skeleton import TORCH_DTYPE
from .streamed import Call
from .visits import Visits, backpropagate


@dataclass(frozen=True, slots=True)
class OtherRoots:
    """Says where a stage's backward begins beside its output. `gradients`: of the whole batch; `roots` returns, for those of a
    micro-batch, tensors of its forward with their gradients."""

    gradients: torch.Tensor
    roots: Callable[[Installed, torch.Tensor], Roots]


class _Writers(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: set[str] = set()
        self._storage = 0

    def watched(self, x: torch.Tensor) -> torch.Tensor:
        self._storage = x.untyped_storage()._cdata
        return x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = args[0] if args and func._schema.is_mutable else None
        if isinstance(written, torch.Tensor) and written.untyped_storage()._cdata == self._storage:
            self.operators.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


class BlockPasses:
    """Computes stages whose input is a boundary. `activations`: by stage; `routing`: None if nothing of it is kept."""

    def __init__(self, visits: Visits, activations: Sequence[Activations], routing: Routing | None = None) -> None:
        self.visits, self.activations, self._routing = visits, activations, routing

    def forward(self, call: Call, x: torch.Tensor, sent: Gathering | None = None) -> torch.Tensor:
        """Returns the stage's output for the whole batch, in one visit. x: (batch, tokens, ...). `sent` is filled with what the
        block sends to experts that are stages of their own."""
        visits = self.visits
        with visits.forward(call.stage, x) as (visit, parameters):
            # Micro-batches seed the device. What the model's own forward draws between stages must not depend on that.
            state = visits.device.random_state()
            y = self.compute(call, x, parameters, stash=visit.stash and visits.fills_by_part(x), sent=sent)
            visits.device.restore_random_state(state)
        return y

    def _watch_routing(
        self, stage: int, parameters: Installed, *, recompute: bool
    ) -> AbstractContextManager[RoutedVisit | None]:
        return nullcontext() if self._routing is None else self._routing.visit(stage, parameters, recompute=recompute)

    def compute(
        self, call: Call, x: torch.Tensor, parameters: Installed, *, stash: bool, sent: Gathering | None = None
    ) -> torch.Tensor:
        """Computes a visit. `stash`: the boundary is copied to its place by micro-batch, from where it computes."""
        visits, activations = self.visits, self.activations[call.stage]
        y = Gathering(visits.crossings, x.shape, visits.gives())
        micro_batches = visits.micro_batches(x)
        arriving = visits.inputs(partial(visits.parts, each, [x]) for each in micro_batches)
        with self._watch_routing(call.stage, parameters, recompute=False) as routed:
            for number, micro_batch in enumerate(micro_batches):
                (part,) = arriving.take()
                version = part._version  # a stage that writes into its input may change what is on its way to the host
                if stash:
                    copied = y.leaving.keep(part, visits.boundaries.rows(call.stage, number))
                    visits.boundaries.awaits(call.stage, copied)
                visits.seed(call.stage, number)
                if routed is not None:
                    routed.begin(number, micro_batch)
                y.put(micro_batch, activations.forward(call.of(number), part, number, parameters))
                if stash and visits.device.separate and part._version != version:
                    raise self._written_into(call.stage, call.of(number), part)
                if sent is not None:
                    sent.put(micro_batch, Sent.by(parameters).packed(micro_batch.end - micro_batch.first))
                if len(micro_batches) > 1:
                    visits.between()
        return y.settled()

    def _written_into(self, number: int, run: Forward, x: torch.Tensor) -> UsageError:
        """Returns the error for a model that writes into a stage's input: the copy of the input on the host may contain what
        was written."""
        writers = _Writers()
        with writers:
            run(writers.watched(x.clone()))
        operators = ", ".join(sorted(writers.operators)) or "an operator"
        stage = self.visits.stages[number]
        name = f"{stage.name} ({type(stage.module).__name__})"
        return UsageError(
            f"{name} writes into its own input ({operators}), which backward needs unchanged",
            hint="change the model's code to write into a copy; if you cannot change it, it cannot be streamed on a GPU",
        )

    def backward(
        self, call: Call, ids: torch.Tensor | None, grad_y: torch.Tensor, other: OtherRoots | None = None
    ) -> torch.Tensor | None:
        """Returns the gradient of the stage's input for the whole batch, and sums the stage's own, in one visit, which also
        begins at `other` roots beside the stage's output. Returns None for `ids`, and where no stage below learns anything."""
        with self.visits.backward(call.stage) as (_, flat, boundary, total):
            return self.differentiate(call, boundary if ids is None else [ids], grad_y, flat, total, other)

    def differentiate(
        self, call: Call, x: list[torch.Tensor], grad_y: torch.Tensor, flat: torch.Tensor | None, total: GradientSum | None,
        other: OtherRoots | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        """Differentiates a visit. x: the boundary by micro-batch."""
        visits, activations = self.visits, self.activations[call.stage]
        micro_batches = visits.micro_batches(grad_y)
        batches = [grad_y] if other is None else [grad_y, other.gradients]
        sources = (partial(lambda n, each: [x[n], *visits.parts(each, batches)], *each) for each in enumerate(micro_batches))
        arriving = visits.inputs(sources, after_upload=activations.begin)
        grad_x = Gathering(visits.crossings, grad_y.shape, visits.gives())
        passes_on = visits.model.stages[call.stage].passes_on
        with (
            visits.learning(call.stage, flat, total) as parameters,
            self._watch_routing(call.stage, parameters, recompute=True) as routed,
        ):
            for number, micro_batch in enumerate(micro_batches):
                part, grad, *more = arriving.take()
                if total is not None:
                    total.begin(number)
                part = part.detach().requires_grad_(True)  # as in forward, so that the same kernels run
                visits.seed(call.stage, number)
                if routed is not None:
                    routed.begin(number, micro_batch)
                with torch.enable_grad():
                    y = activations.recompute(call.of(number), part, number, flat, parameters)
                    roots = [] if routed is None else routed.roots()
                    if other is not None:
                        roots += other.roots(parameters, *more)
                    backpropagate(y, grad, [part, *parameters] if passes_on else parameters, roots)
                del y, grad, more, roots  # each is as large as a micro-batch's boundary
                if passes_on:
                    assert part.grad is not None
                    grad_x.put(micro_batch, part.grad)
                if len(micro_batches) > 1:
                    visits.between()
        visits.boundaries.awaits(call.stage, *arriving.uploads)
        return grad_x.settled() if passes_on else None


# ---- blocks and ranges of their experts ---------------------------------------------------------------------------
# Computes blocks whose experts are stages of their own (`engine/cutting`): the block's visit, then one of each range.


class RangedPasses(BlockPasses):
    """Computes stages whose input is a boundary, and with a block the ranges of its experts that follow."""

    def first_in_backward(self, stage: int) -> int:
        """Returns the stage whose visit begins the backward of a call of `stage`."""
        return self.visits.model.ranges(stage).stop - 1

    def forward(self, call: Call, x: torch.Tensor, sent: Gathering | None = None) -> torch.Tensor:
        ranges = self.visits.model.ranges(call.stage)
        if not ranges:
            return super().forward(call, x)
        sent = Gathering(self.visits.crossings, x.shape)
        y = super().forward(call, x, sent)
        whole = sent.settled()
        sums = self._room(y, y.shape[-1])
        for stage in ranges:
            self._add(stage, whole, sums, y, choices=self.visits.model.stages[call.stage].choices)
        return y

    def backward(
        self, call: Call, ids: torch.Tensor | None, grad_y: torch.Tensor, other: OtherRoots | None = None
    ) -> torch.Tensor | None:
        model = self.visits.model
        ranges = model.ranges(call.stage)
        if not ranges:
            return super().backward(call, ids, grad_y)
        goes_back, choices = model.stages[call.stage].goes_back, model.stages[call.stage].choices
        sums = self._room(grad_y, grad_y.shape[-1] + choices) if goes_back else None
        sent: torch.Tensor | None = None
        for stage in reversed(ranges):
            if model.stages[stage].goes_back:
                follows = stage > ranges[0] and model.stages[stage - 1].goes_back
                sent = self._differentiate(stage, sent, sums, grad_y, choices=choices, follows=follows)
        del sent
        if sums is None:
            return None
        return super().backward(call, ids, grad_y, OtherRoots(sums, lambda parameters, sums: Sent.by(parameters).roots(sums)))

    def _room(self, like: torch.Tensor, columns: int) -> torch.Tensor:
        """Returns room for sums of the whole batch. They are in float32: rounding after each range would make the result depend
        on the number of ranges."""
        return self.visits.crossings.batches.lend((*like.shape[:2], columns), torch.float32)

    def _add(self, stage: int, sent: torch.Tensor, sums: torch.Tensor, y: torch.Tensor, *, choices: int) -> None:
        """Visits a range, which adds its outputs to `sums`; the last one adds these to `y`."""
        visits = self.visits
        is_first, is_last = visits.model.stages[stage - 1].expert_range is None, visits.model.stages[stage].is_last_range
        micro_batches, batches = visits.micro_batches(sent), [sent, *([] if is_first else [sums]), *([y] if is_last else [])]
        leaving, target = Leaving(visits.crossings), y if is_last else sums
        with visits.forward(stage, sent) as (visit, parameters):
            arriving, gives = visits.inputs(partial(visits.parts, part, batches) for part in micro_batches), visits.gives()
            if gives is not None:
                gives.send_out_of(y)
            for number, part in enumerate(micro_batches):
                packed, *more = arriving.take()
                if visit.stash and visits.device.separate:
                    copied = leaving.keep(packed, visits.boundaries.rows(stage, number))
                    visits.boundaries.awaits(stage, copied)
                total = self._zero_sums(part, sums) if is_first else more.pop(0)
                flat_total = total.view(-1, total.shape[-1])
                add_outputs(visits.stages[stage], parameters, Sent.of(packed, y.shape[-1], choices), flat_total, self._inside)
                clear_padding(target, part)
                leaving.put((more[0] + total).to(y.dtype) if is_last else total, part.of(target), gives)
                del packed, more, total, flat_total
                visits.between()
            leaving.settle()

    def _inside(self) -> None:
        """Moves on what can move on, where this thread computes."""
        if not self.visits.device.separate:
            self.visits.inside()

    def _zero_sums(self, part: MicroBatch, sums: torch.Tensor) -> torch.Tensor:
        return self.visits.crossings.room_for(part.of(sums)).zero_()

    def _differentiate(
        self, stage: int, sent: torch.Tensor | None, sums: torch.Tensor | None, grad_y: torch.Tensor, *, choices: int,
        follows: bool,
    ) -> torch.Tensor | None:  # fmt: skip
        """Visits a range in backward: adds the gradients of what it was sent to `sums` (None: nobody wants them), and sums its
        own. `sent`: None in the first of these visits, which takes it from where it was kept, and returns it if another
        `follows`."""
        visits = self.visits
        is_first, micro_batches = sent is None, visits.micro_batches(grad_y)
        batches = [grad_y] if is_first or sums is None else [grad_y, sums]
        leaving = Leaving(visits.crossings)
        with visits.backward(stage) as (_, flat, kept, total):
            if is_first and follows:
                sent = visits.crossings.batches.lend((*grad_y.shape[:2], kept[0].shape[-1]), kept[0].dtype)
            sources = (
                partial(lambda n, part: [kept[n] if kept else part.of(sent).contiguous(), *visits.parts(part, batches)], *one)
                for one in enumerate(micro_batches)
            )
            arriving = visits.inputs(sources)
            with visits.learning(stage, flat, total) as parameters:
                for number, part in enumerate(micro_batches):
                    packed, grad, *more = arriving.take()
                    if total is not None:
                        total.begin(number)
                    if is_first and sent is not None:
                        leaving.put(packed, part.of(sent))
                    part_sums = None if sums is None else more[0] if more else self._zero_sums(part, sums)
                    differentiate(
                        visits.stages[stage], parameters, Sent.of(packed, grad.shape[-1], choices),
                        grad.reshape(-1, grad.shape[-1]),
                        None if part_sums is None else part_sums.view(-1, part_sums.shape[-1]), self._inside,
                    )  # fmt: skip
                    if sums is not None and part_sums is not None:
                        clear_padding(sums, part)
                        leaving.put(part_sums, part.of(sums))
                    del packed, grad, more, part_sums
                    visits.between()
            leaving.settle()
            visits.boundaries.awaits(stage, *arriving.uploads)
        return sent


# ---- embeddings ---------------------------------------------------------------------------------------------------
# Computes visits of embeddings: row by row if one is a lookup, and piece by piece if it is cut along the vocabulary.


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
        self._step_ids: list[StepIds] = []  # for the ids that the step's forward is given

    def place_ids(self, ids: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """Returns a step's ids and positions (in host memory) where the model's forward wants them. Nothing is submitted yet.
        Raises UsageError for an id that no row has."""
        placed = [self.visits.crossings.beside_batch(value) for value in (ids, positions)]
        self._step_ids = [] if self._table is None else [self._ids_for(self._table, ids)]
        if self._table is not None and self.visits.moves.rows.stages:
            self.visits.look_up({self._table + place: rows for place, rows in enumerate(self._step_ids[0].rows())})
        if self._more:
            self._step_ids.append(self._ids_for(None, positions))
        for ids_of_step, value in zip(self._step_ids, placed, strict=False):
            ids_of_step.are(value)
        return placed

    def _ids_for(self, table: int | None, ids: torch.Tensor) -> StepIds:
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
        return StepIds(parts, pieces, self.visits.crossings.upload_now, begins=[*begins, ids.numel()])

    def _ids_of(self, call: Call, ids: torch.Tensor) -> OfMicroBatches:
        known = next((part for ids_of_step in self._step_ids if (part := ids_of_step.part(ids)) is not None), None)
        if known is None:
            return self._ids_for(call.stage, ids.cpu()).looked  # sync: the model's own code made these ids
        return known

    def forward(self, call: Call, x: torch.Tensor, sent: Gathering | None = None) -> torch.Tensor:
        """Passes ids to the visits. x: (batch, tokens) int64, where the batch is."""
        if call.stage in self.visits.moves.rows.stages and self._step_ids[0].part(x) is None:
            self.visits.moves.rows.expect_others()
        if call.stage not in self._pieces:
            return super().forward(call, x)
        # Each piece puts its rows where its ids are: the result is that of a whole table, bit for bit.
        looked, y = self._ids_of(call, x), None
        for stage in self._pieces[call.stage]:
            y = self._look_up(stage, call, x, looked, y)
        assert y is not None
        return y

    def backward(self, call: Call, ids: torch.Tensor | None, grad_y: torch.Tensor, other: OtherRoots | None = None) -> None:
        assert ids is not None
        if call.stage in self._pieces:
            self._backward_in_pieces(call, ids, grad_y)
        else:
            super().backward(call, ids, grad_y)

    # ---- whole -----------------------------------------------------------------------------------------------------

    def compute(
        self, call: Call, x: torch.Tensor, parameters: Installed, *, stash: bool, sent: Gathering | None = None
    ) -> torch.Tensor:
        """Computes a visit. All rows may share the ids. If memory is the host's, one lookup does all."""
        visits = self.visits
        if visits.device.separate and call.stage in self._lookups:
            return super().compute(call, x, parameters, stash=stash)
        y = Gathering(visits.crossings, x.shape)
        (ids,) = visits.inputs([lambda: [x]]).take()
        visits.seed(call.stage, 0)
        y.put(whole_rows(*x.shape[:2]), call.run(ids))
        return y.settled()

    def differentiate(
        self, call: Call, x: list[torch.Tensor], grad_y: torch.Tensor, flat: torch.Tensor | None, total: GradientSum | None,
        other: OtherRoots | None = None,
    ) -> None:  # fmt: skip
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
            backpropagate(call.run(whole_ids), whole_grad, [*parameters])

    # ---- in pieces -------------------------------------------------------------------------------------------------

    def _look_up(
        self, stage: int, call: Call, ids: torch.Tensor, looked: OfMicroBatches, y: torch.Tensor | None
    ) -> torch.Tensor:
        """Puts the rows of one piece in their places in `y` on the device. If there are pieces before, their rows go up
        first."""
        visits = self.visits
        module, before, (first, _) = self._module(call.stage), y, visits.stages[stage].rows
        micro_batches = visits.micro_batches(ids)
        sources = (ids,) if before is None else (ids, before)
        leaving = Leaving(visits.crossings)
        with visits.forward(stage), padding_at(module, None):
            arriving = visits.inputs(partial(visits.parts, each, sources) for each in micro_batches)
            for number, micro_batch in enumerate(micro_batches):
                part_ids, *rows = arriving.take()
                places = looked[number][stage - call.stage].places
                assert places is not None
                looked_up = call.run(part_ids.reshape(-1)[places] - first)
                if y is None:
                    y = visits.crossings.batches.lend((*ids.shape, looked_up.shape[-1]), looked_up.dtype)
                clear_padding(y, micro_batch)
                rows = rows or [visits.crossings.room_for(micro_batch.of(y))]
                rows[0].view(-1, y.shape[-1]).index_copy_(0, places, looked_up)
                leaving.put(rows[0], micro_batch.of(y))
                del rows, looked_up
                visits.between()
            leaving.settle()
        assert y is not None
        return y

    def _backward_in_pieces(self, call: Call, ids: torch.Tensor, grad_y: torch.Tensor) -> None:
        """Sums every piece's gradients by rows. ids: (batch, tokens) int64; grad_y: (batch, tokens, width)."""
        assert grad_y.shape[: ids.dim()] == ids.shape, (grad_y.shape, ids.shape)
        visits, looked = self.visits, self._ids_of(call, ids)
        for stage in reversed(self._pieces[call.stage]):
            first, _ = visits.stages[stage].rows
            with visits.backward(stage) as (_, _, _, total):
                assert total is not None
                for number, (chosen, grad) in enumerate(self._by_token(ids, grad_y)):
                    of_piece = looked[number][stage - call.stage]
                    if of_piece.distinct.numel():
                        add_rows(self._module(call.stage), call.run, of_piece, chosen, grad, total, first=first)
                    visits.between()

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
