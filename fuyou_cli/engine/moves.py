"""Runs the residency ledger for real: updates in the swap daemon or on the device, waits on the wall clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from ..core.process import SILENT, Patience
from ..planner.ledgers import FOREVER, Record, Residency
from ..swap.daemon import Result
from .context import Context
from .devices.base import Moment
from .looked_up_rows import FIRST_TICKET, LookedUpRows
from .updates import DeviceStates, build_update, lost, sums_of

# Takes a cause; the time that compute waits inside the context is a stall of that cause.
Waiting = Callable[[str], AbstractContextManager[None]]

_MOST_WAITS = 1 << 14  # waits that are remembered until the caller asks
_OPEN_WAITS = 64  # waits whose times are not read yet; far more than the host makes while it is ahead of a device
_FIRST_POLL_SECONDS, _POLL_SECONDS = 50e-6, 0.002  # a wait polls often at first, then less often


@dataclass(frozen=True, slots=True)
class ComputeWait:
    """When compute waited, in monotonic seconds."""

    cause: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class _HostWait:
    """A wait of the host from `begin` on, the end of the compute submitted before it, and the earliest begin of compute
    after it.

    Compute waited only between these two. The host may wait while the device still has work.
    """

    cause: str
    begin: float
    over: Moment
    goes_on: Moment

    def of_compute(self) -> ComputeWait:
        """Returns the time that compute waited, which may be none. May wait for the device."""
        begin = max(self.begin, self.over())
        return ComputeWait(self.cause, begin, max(begin, self.goes_on()))


class Committing(Protocol):
    """Makes states durable; a part of checkpointing."""

    def complete(self, generation: int) -> None:
        """Takes note that every stage has reached `generation`. No stage goes on until that is durable."""
        ...

    def durable(self, stage: int) -> int:
        """Returns the turn at which the newest manifest on stable storage names the stage. Raises if committing failed."""
        ...


class NoCheckpoints:
    """Keeps no states: they are lost when the process ends."""

    def complete(self, generation: int) -> None:
        pass

    def durable(self, stage: int) -> int:
        return FOREVER


class DaemonMoves:
    """Keeps `residency` for one executor; `tick` moves everything that can move."""

    def __init__(
        self, context: Context, *, states: DeviceStates, tick: Callable[[], None], patience: Patience = SILENT
    ) -> None:
        model, plan, daemon = context.model, context.plan, context.daemon
        self.model, self.plan, self.daemon = model, plan, daemon
        self._mark, self._memory, self.states = context.device.mark, context.memory, states
        self._tick, self._patience = tick, patience
        self.committing: Committing = NoCheckpoints()
        self.rows = LookedUpRows(model=model, plan=plan, daemon=daemon, memory=context.memory)
        self._open: deque[_HostWait] = deque()  # not read yet: the host would lose its lead over a device
        self._waits: deque[ComputeWait] = deque(maxlen=_MOST_WAITS)
        self.residency = Residency(model=model, plan=plan, transfers=self, runner=self)

    # ---- transfers (the ledger calls these) ------------------------------------------------------------------------

    def read(self, arena_offset: int, store_offset: int, size: int, *, priority: int = 0, label: int = 0) -> int:
        if label in self.rows.stages:  # nothing but its table rests there
            return self.rows.fetch(label, arena_offset)
        return self.daemon.read(arena_offset, store_offset, size, priority=priority, label=label)

    def write(self, arena_offset: int, store_offset: int, size: int, *, priority: int = 0, label: int = 0) -> int:
        return self.daemon.write(arena_offset, store_offset, size, priority=priority, label=label)

    def poll(self, ticket: int) -> object | None:
        if ticket >= FIRST_TICKET:
            return self.rows.poll(ticket)
        # One number space for three sources: the daemon counts from 0 up, the device's updates from -1 down.
        return self.daemon.poll(ticket) if ticket >= 0 else self.states.poll(ticket)

    # ---- updates ---------------------------------------------------------------------------------------------------

    def update(self, record: Record) -> int:
        """Starts the AdamW of one stage, in the daemon or on the device. Returns its ticket."""
        commits = self.residency.commits
        target, copied = commits.next_turn(record.turn, record.generation), commits.is_written(record.generation + 1)
        if self.plan.stages[record.stage].updated_on_device:  # gradients are there too: nothing crosses
            return self.states.update(record, target=target, copied=copied)
        request = build_update(
            record, self.model.stages[record.stage], self.plan.stages[record.stage], numerics=self.plan.numerics,
            layout=self.model.layout, target=target, copied=copied,
        )  # fmt: skip
        return self.daemon.update(request)

    def end_update(self, record: Record, result: Result) -> None:
        if result.nonfinite:
            name = self.model.stages[record.stage].name
            raise lost(f"{result.nonfinite} weights of {name}", generation=record.generation + 1)
        # A manifest names what a commit wrote by these sums; frozen weights keep theirs.
        written = self.residency.commits.is_written(record.generation + 1)
        record.sums = sums_of(result, self.plan.stages[record.stage], record.sums, copied=written)

    def join(self, record: Record) -> None:
        # Frozen parameters were read from the store behind them: a visit wants both in one span.
        home, slot = self.plan.stages[record.stage].trained_ram, record.span
        assert home is not None and slot is not None
        arena = self._memory.arena
        arena.view(slot.offset, home.size)[:] = arena.view(home.offset, home.size)

    def complete_generation(self, generation: int) -> None:
        self.committing.complete(generation)

    def durable(self, stage: int) -> int:
        return self.committing.durable(stage)

    def wait(self, condition: Callable[[], bool], cause: str) -> None:
        # Nothing wakes this thread: it waits for drives, update threads and copies at once, and every look may begin work that
        # others wait for (`tick`). So it polls.
        with self.waiting(cause):
            pause, waiting = _FIRST_POLL_SECONDS, self._patience.waiting(cause)
            while not condition():
                time.sleep(pause)
                waiting.look()
                pause = min(2 * pause, _POLL_SECONDS)
                self._tick()

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """Records a stall of `cause` while the host waits, or makes compute wait, inside."""
        begin, over = time.monotonic(), self._mark()
        yield  # do not ask a device that has failed
        self._open.append(_HostWait(cause, begin, over, self._mark()))
        # To read a mark's time waits for the device, and would take away the host's lead. Old waits have passed anyway.
        self.book_waits(but=_OPEN_WAITS)

    def book_waits(self, *, but: int = 0) -> None:
        """Sums the time that compute waited, by cause, except for the last few waits. May wait for the device."""
        while len(self._open) > but:
            wait = self._open.popleft().of_compute()
            if wait.end > wait.begin:
                self._waits.append(wait)
                self.residency.add_stall(wait.cause, wait.end - wait.begin)

    def waits(self) -> list[ComputeWait]:
        """Returns the waits of compute since the last call, as far as they are summed."""
        waits, self._waits = self._waits, deque(maxlen=_MOST_WAITS)
        return list(waits)
