"""Describes the residency ledger's runner where bytes really move: updates in the swap daemon, waits on the wall clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from ..core.errors import NumericsError
from ..core.patience import SILENT, Patience
from ..planner.free_extents import FOREVER
from ..planner.records import Record
from ..planner.residency import Residency
from ..spec.model import ModelSpec
from ..spec.plan import Plan
from ..swap.daemon import Result, SwapDaemon
from .updates import build_update, sums_of

Waiting = Callable[[str], AbstractContextManager[None]]  # of a cause: the time spent inside is a stall of it

_MOST_WAITS = 1 << 14  # that are remembered until somebody asks
_FIRST_POLL_SECONDS, _POLL_SECONDS = 50e-6, 0.002  # a wait looks around often at first, then less often


@dataclass(frozen=True, slots=True)
class Wait:
    """Tells when compute waited, in monotonic seconds."""

    cause: str
    begin: float
    end: float


class Committing(Protocol):
    """Stands for whoever makes states durable."""

    def complete(self, generation: int) -> None:
        """Hears that every stage has reached `generation`, and stays at it until that is durable."""
        ...

    def durable(self, stage: int) -> int:
        """Returns the turn at which the newest manifest on stable storage names the stage. Raises where that failed."""
        ...

    def blocked(self) -> None:
        """Hears that an update waits until a manifest names what other stages have come to."""
        ...


class Unkept:
    """Keeps no states: they are given up with the process."""

    def complete(self, generation: int) -> None:
        pass

    def durable(self, stage: int) -> int:
        return FOREVER

    def blocked(self) -> None:
        pass


class DaemonMoves:
    """Keeps `residency` for one executor; `tick` moves everything that can move."""

    def __init__(
        self, *, model: ModelSpec, plan: Plan, daemon: SwapDaemon, tick: Callable[[], None], patience: Patience = SILENT
    ) -> None:
        self.model, self.plan, self.daemon, self._tick, self._patience = model, plan, daemon, tick, patience
        self.committing: Committing = Unkept()
        self._waits: deque[Wait] = deque(maxlen=_MOST_WAITS)
        self.residency = Residency(model=model, plan=plan, transfers=daemon, runner=self)

    def update(self, record: Record) -> int:
        """Starts the AdamW of one stage, wholly in C; its ticket."""
        commits = self.residency.commits
        request = build_update(
            record,
            self.model.stages[record.stage],
            self.plan.stages[record.stage],
            dtypes=(self.model.compute_dtype, self.plan.numerics.accumulate_dtype),
            target=commits.next_turn(record.turn, record.generation),
            copied=commits.is_written(record.generation + 1),
        )
        return self.daemon.update(request)

    def updated(self, record: Record, result: Result) -> None:
        if result.nonfinite:
            raise NumericsError(
                f"step {record.generation + 1}: {result.nonfinite} weights of {self.model.stages[record.stage].name} are not "
                "finite after the update",
                hint="lower optimizer.lr, or set train.clip_grad_norm, which sees gradients before anything is updated",
                changed=True,
            )
        written = self.residency.commits.is_written(record.generation + 1)
        record.sums = sums_of(result, self.plan.stages[record.stage], copied=written)

    def rested(self, record: Record, result: Result) -> None:
        record.gradients_sum = result.data_sum if self.plan.store_mode == "redo" else None

    def completed(self, generation: int) -> None:
        self.committing.complete(generation)

    def durable(self, stage: int) -> int:
        return self.committing.durable(stage)

    def blocked(self) -> None:
        self.committing.blocked()

    def waited(self, done: Callable[[], bool], cause: str) -> float:
        begin = time.monotonic()
        pause, waiting = _FIRST_POLL_SECONDS, self._patience.waiting(cause)
        while not done():
            time.sleep(pause)
            waiting.look()
            pause = min(2 * pause, _POLL_SECONDS)
            self._tick()
        return self._over(cause, begin)

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """Notes that inside, compute waits for a copy, and nothing else is looked after."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.residency.stalled(cause, self._over(cause, begin))

    def waits(self) -> list[Wait]:
        """Returns those since the last call."""
        waits, self._waits = self._waits, deque(maxlen=_MOST_WAITS)
        return list(waits)

    def _over(self, cause: str, begin: float) -> float:
        """Remembers a wait that ends now; returns its seconds."""
        end = time.monotonic()
        self._waits.append(Wait(cause, begin, end))
        return end - begin
