"""Computes losses and next tokens without training: the executor's visits, forward alone, with the weights as they are after
its last step.

Weights pass through the slots of a step. Stages keep nothing: two boundaries of the rows are there at most, one going into a
stage and one coming out. An update that is due runs when its stage is visited first, so the weights are those of a whole step.
Dropout is off, and generators stay as they were.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..planner.evaluation_schedule import evaluation_schedule
from .activations.recompute import Recompute
from .calls import one_row_masks
from .executor import Executor
from .loss import shifted
from .passes.block import BlockPasses


class ForwardOnly:
    """Evaluates rows beside the steps of one executor. The step before has to be told that it is the `last`: what it prefetched
    would be in the way."""

    def __init__(self, executor: Executor) -> None:
        self._executor, visits = executor, executor.visits
        self.schedule = evaluation_schedule(visits.model, visits.plan)
        compiled = executor.compiled
        nothing = [compiled if compiled and stage.kind == "block" else Recompute(stage) for stage in visits.model.stages]
        self._blocks = BlockPasses(visits, nothing)

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

    def losses(self, input_ids: torch.Tensor, labels: torch.Tensor, *, last: bool) -> torch.Tensor:
        """Returns each row's sum of its labels' losses: (rows,) float64, in host memory. Only inside `open`.

        input_ids, labels: (rows, tokens) int64 in host memory, at most `rows` of them; labels hold -100 where nothing counts.
        `last` stops prefetching for rows that will not come.
        """
        head = self._executor.head
        self._executor.visits.begin_round(last=last)
        targets = head.told(shifted(labels))
        tokens, _ = head.folded(self._hidden(input_ids), targets)
        return tokens.by_row().cpu()  # sync: at the end of a pass over the model

    def next_logits(self, input_ids: torch.Tensor, at: torch.Tensor, *, last: bool) -> torch.Tensor:
        """Returns the logits of the token that follows each row's token `at`: (rows, vocabulary) float32, in host memory. Only
        inside `open`.

        input_ids: (rows, tokens) int64 in host memory, padded on the right; at: (rows,) int64, places. `last`: as in `losses`.
        """
        self._executor.visits.begin_round(last=last)
        hidden = self._hidden(input_ids)
        return self._executor.head.logits(hidden[torch.arange(len(at)), at].unsqueeze(1)).cpu()  # sync: as in `losses`

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

    def _hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns the last hidden state (rows, tokens, width), where the batch is."""
        executor = self._executor
        assert input_ids.shape[0] <= self.rows, (input_ids.shape, self.rows)
        ids, positions = executor.embeddings.placed(input_ids, torch.arange(input_ids.shape[1]).unsqueeze(0))
        model = executor.anatomy.model
        with one_row_masks(model):
            hidden: torch.Tensor = model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        executor.forget_calls()
        return hidden
