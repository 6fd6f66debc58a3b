"""Computes losses and next tokens without training: the executor's visits, forward alone, with the weights as they are after
its last step.

Weights pass through the slots of a step. Stages keep nothing: two boundaries of the rows are there at most, one going into a
stage and one coming out. An update that is due runs when its stage is visited first, so the weights are those of a whole step.
Dropout is off, and generators stay as they were.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from ..planner.evaluation_schedule import evaluation_schedule
from ..spec.plan import MicroBatch, even
from .activations import Recompute
from .attention import Documents
from .executor import Executor
from .loss import shifted
from .passes import RangedPasses


class Rows(Protocol):
    """Holds rows as arrays (`data.batches.Batch`)."""

    @property
    def documents(self) -> Documents | None: ...

    @property
    def sweeps(self) -> Sequence[tuple[MicroBatch, ...]] | None: ...

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ids and labels, (rows, tokens) int64 in host memory; labels hold -100 where nothing counts."""
        ...


class ForwardOnly:
    """Evaluates rows beside the steps of one executor. The step before has to be told that it is the `last`: what it prefetched
    would be in the way."""

    def __init__(self, executor: Executor) -> None:
        self._executor, visits = executor, executor.visits
        self.schedule = evaluation_schedule(visits.model, visits.plan)
        compiled = executor.compiled
        nothing = [compiled if compiled and stage.kind == "block" else Recompute(stage) for stage in visits.model.stages]
        self._blocks = RangedPasses(visits, nothing)

    @property
    def rows(self) -> int:
        """Returns how many rows go through the model at once, as planned."""
        return self._executor.plan.group.batch_size

    @contextmanager
    def open(self) -> Iterator[None]:
        """Prepares model and visits for passes, inside."""
        executor, model = self._executor, self._executor.anatomy.model
        blocks, random = executor.blocks, executor.device.random_state()
        executor.blocks = self._blocks
        model.eval()
        try:
            with torch.no_grad(), executor.visits.following(self.schedule):
                yield
        finally:
            executor.forget_calls()
            executor.blocks = blocks
            model.train()
            executor.device.restore_random_state(random)
            executor.visits.moves.book_waits()

    def losses(self, batch: Rows, *, last: bool) -> torch.Tensor:
        """Returns the loss of every token, 0 where it is no label: (rows, tokens) float64, in host memory. Only inside `open`.
        `batch`: no more micro-batches than a sweep has. `last` stops prefetching for rows that will not come."""
        head, (input_ids, labels) = self._executor.head, batch.tensors()
        self._executor.visits.begin_round(last=last)
        targets = head.told(shifted(labels))
        tokens, _ = head.folded(self._hidden(input_ids, batch), targets)
        return tokens.by_token()

    def next_logits(self, batch: Rows, at: Sequence[tuple[int, int]], *, last: bool) -> torch.Tensor:
        """Returns the logits of the tokens that follow those `at` (row, place): (len(at), vocabulary) float32, in host memory.
        Only inside `open`. `batch`, `last`: as in `losses`."""
        visits = self._executor.visits
        visits.begin_round(last=last)
        hidden = self._hidden(batch.tensors()[0], batch)
        visits.divide(())
        rows, places = (torch.tensor(numbers) for numbers in zip(*at, strict=True))
        return self._executor.head.logits(hidden[rows, places].unsqueeze(1)).cpu()  # sync: as in `losses`

    def weights(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Visits all stages, and yields those that own parameters with their weights: 1-D, in the compute dtype, on the device.
        Only inside `open`. A stage's weights are there until the next one is asked for; ask for all, or call `stop_ahead`."""
        visits = self._executor.visits
        visits.begin_round(last=True)
        visits.look_up(None)
        for planned in self.schedule.visits:
            visit, flat = visits.enter(planned.phase, planned.stage)
            visits.inputs([])  # there are none
            begin = time.monotonic()
            if flat is not None and visit.owner == visit.stage:
                yield visit.stage, flat
            visits.leave(visit, begin)

    def stop_ahead(self) -> None:
        """Forgets what was prefetched for a pass that will not come. Only inside `open`."""
        self._executor.visits.abandon()

    def _hidden(self, input_ids: torch.Tensor, batch: Rows) -> torch.Tensor:
        """Returns the last hidden state (rows, tokens, width), where the batch is."""
        executor, (rows, width) = self._executor, input_ids.shape
        numerics = executor.plan.group
        assert rows <= self.rows, (rows, self.rows)
        parts = even(rows, numerics.micro_batch_size, width) if batch.sweeps is None else batch.sweeps[0]
        executor.visits.divide(parts)
        divided = executor.streamed.divided(parts, batch.documents, width, step=numerics.document_step)
        ids, positions = executor.embeddings.placed(input_ids, torch.arange(width).unsqueeze(0))
        hidden = executor.streamed.hidden(ids, positions, divided)
        executor.forget_calls()
        return hidden
