"""Says which rows make up step n. The position in the data is the step number: nothing is replayed on resume."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Sampler:
    """Draws the rows of every global step.

    Epochs follow each other without a seam: the permutation of epoch e fills positions [e * rows, (e + 1) * rows) of
    one endless sequence and step n takes positions [n * batch_size, (n + 1) * batch_size).

    The permutation is the stable sort order of Philox's raw output for (seed, epoch), which numpy keeps the same
    between releases (`Generator.permutation` it does not). One permutation is held: 8 bytes per row; while it is made,
    `PEAK_BYTES` per row.
    """

    PEAK_BYTES = 24  # 8 drawn, 8 of their order, and what the sort works with

    def __init__(self, rows: int, *, batch_size: int, shuffle: bool, seed: int) -> None:
        if rows < 1 or batch_size < 1:
            raise ValueError(f"a sampler needs rows and a batch size of at least 1, not {rows} and {batch_size}")
        self.rows = rows
        self.batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed % (1 << 64)
        self._epoch: int | None = None
        self._order: NDArray[np.int64] = np.arange(0)

    @property
    def peak_bytes(self) -> int:
        """Returns the bytes it takes at most, sooner or later."""
        return self.PEAK_BYTES * self.rows

    def steps(self, epochs: float) -> int:
        """Counts the steps until every row has been seen `epochs` times (a fraction counts rows, rounded up)."""
        positions = -int(-(self.rows * epochs) // 1)
        return -(-positions // self.batch_size)

    def note(self, steps: int, epochs: int | None) -> str | None:
        """Says what whole batches make of a run of `steps`, where it is not what a person expects: rows that come more than
        once in a step, or a tenth more epochs than the recipe's (None: it asks for steps)."""
        seen = steps * self.batch_size
        more = epochs is not None and 10 * seen > 11 * self.rows * epochs
        facts = []
        if self.batch_size > self.rows:
            facts.append(f"each row is seen about {self.batch_size / self.rows:.3g} times per step")
        if more:
            are = "steps are" if steps != 1 else "step is"
            facts.append(f"{steps:,} {are} {self.epoch(steps):.3g} epochs, train.epochs is {epochs}")
        if not facts:
            return None
        told = f"{self.rows:,} row{'s' * (self.rows != 1)}, batches of {self.batch_size:,}: {', and '.join(facts)}"
        return f"{told} (a smaller train.batch_size comes closer)"

    def epoch(self, step: int) -> float:
        """Says how many times the data has been seen before global step `step`."""
        return step * self.batch_size / self.rows

    def batch(self, step: int) -> list[int]:
        """Returns the row indices of global step `step`; 0 is the first."""
        if step < 0:
            raise ValueError(f"step {step} is negative")
        chosen: list[int] = []
        position, end = step * self.batch_size, (step + 1) * self.batch_size
        while position < end:
            epoch, begin = divmod(position, self.rows)
            part = self._permutation(epoch)[begin : begin + end - position].tolist()
            chosen += part
            position += len(part)
        return chosen

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if self._epoch is None or (self._shuffle and self._epoch != epoch):
            self._order, self._epoch = np.arange(0), None  # not beside the next one
            if self._shuffle:
                drawn = np.random.Philox(key=np.array([self._seed, epoch], np.uint64)).random_raw(self.rows)
                self._order = np.argsort(drawn, kind="stable")
            else:
                self._order = np.arange(self.rows)
            self._epoch = epoch
        return self._order
