"""Evaluates a run's sets of rows between its steps: where it starts, every so many steps, and where it ends."""

from __future__ import annotations

import math
import time

from ..data import Rows, collate
from ..engine.executor import Executor
from ..engine.forward_only import ForwardOnly
from .report import EvalReport
from .steps import Ready


class Evaluations:
    """Evaluates the sets of one run. It takes no memory beside a step's: as many rows as a step's, forward alone."""

    def __init__(self, ready: Ready, executor: Executor) -> None:
        self._sets, self._asked, self._total = ready.evaluated, ready.planned.recipe.eval, ready.planned.total_steps
        self._max_len = executor.plan.numerics.max_seq_len
        self._forward = ForwardOnly(executor)

    def due(self, step: int) -> bool:
        """Tells whether an evaluation follows after so many steps."""
        every = self._asked.every_steps
        if step == 0:
            return bool(self._sets) and self._asked.at_start
        return bool(self._sets) and (step == self._total or (every is not None and step % every == 0))

    def run(self, step: int) -> list[EvalReport]:
        """Evaluates every set with the weights after `step`. Raises what a callback of the executor raises, after which the
        run may go on or be saved."""
        with self._forward.open():
            names = list(self._sets)
            return [self._evaluate(name, step, last=name == names[-1]) for name in names]

    def _evaluate(self, name: str, step: int, *, last: bool) -> EvalReport:
        rows, begin = self._sets[name], time.monotonic()
        order = sorted(range(len(rows)), key=lambda row: len(rows.tokens(row)))  # rows of a length: less padding
        total, tokens = 0.0, 0
        for first in range(0, len(order), self._forward.rows):
            until = first + self._forward.rows
            loss, count = self._losses(rows, order[first:until], last=last and until >= len(order))
            total, tokens = total + loss, tokens + count
        loss = total / tokens
        return EvalReport(
            step=step,
            name=name,
            loss=loss,
            perplexity=math.exp(loss) if loss < _LARGEST else math.inf,
            tokens=tokens,
            rows=len(rows),
            seconds=time.monotonic() - begin,
        )

    def _losses(self, rows: Rows, order: list[int], *, last: bool) -> tuple[float, int]:
        """Returns the sum of some rows' losses, and the number of their labels."""
        batch = collate(rows, order, pad_id=rows.summary.pad_id, max_len=self._max_len)
        ids, labels = batch.tensors()
        return float(self._forward.losses(ids, labels, last=last).sum()), batch.label_tokens


_LARGEST = 700.0  # whose exponential still is a double
