"""Runs the residency ledger for real: updates in the swap daemon or on the device, waits on the wall clock.

Of a frozen table of tokens only the rows that a step looks up are read, to where they lie in its slot (`LookedUpRows`). The
rest of the slot holds anything. A fetch may begin before the step does: it takes its slot, and waits until it is told the rows.
The first fetch of a run reads all of the table: it is compared as a whole with what was written, and the checksums of its rows
are kept for later fetches. If the model's own code looks up other ids than the step's, this is found then, and all fetches read
all of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from ..core.errors import UsageError
from ..core.process import SILENT, Patience
from ..planner.layout import row_span
from ..planner.ledgers import FETCH_PRIORITY, FOREVER, Record, Residency
from ..spec.model import ITEM_SIZE, PAGE, ModelSpec, StageSpec
from ..spec.plan import Plan, Span
from ..swap.daemon import Result, SwapDaemon
from ..swap.kernels import checksum
from .context import Context, HostMemory
from .devices.base import Moment
from .updates import DeviceStates, build_update, lost, sums_of

# ---- looked-up rows ---------------------------------------------------------------------------------------------------

FIRST_TICKET = 1 << 62  # the daemon's own are smaller
_AT_ONCE = 512  # reads of rows under way, of all tables: far fewer than the daemon takes


@dataclass(slots=True)
class Table:
    """Holds what is known of one stage's table, or of the rows of a table that the stage holds."""

    stage: int
    first: int  # bytes of the slot before row 0
    row: int  # bytes of a row
    rows: int
    extent: Span  # of the store or a source; the slot begins with it
    wanted: torch.Tensor | None = None  # rows of the next fetch
    was_read: bool = False  # all of it
    sums: np.ndarray | None = None  # of the pages of each row

    def pages(self, row: int) -> tuple[int, int]:
        """Returns begin and end of the pages that hold the row, in bytes from the beginning of the slot or extent."""
        return row_span(self.first, self.row, row)

    def apart(self, rows: torch.Tensor) -> list[int]:
        """Returns one of the rows for all that have the same pages."""
        begin = self.first + rows.numpy() * self.row
        pages = np.stack((begin // PAGE, -(-(begin + self.row) // PAGE)))
        return [int(row) for row in rows[np.unique(pages, axis=1, return_index=True)[1]]]


@dataclass(slots=True)
class _Fetch:
    table: Table
    arena: int
    waiting: list[int] | None = None  # rows still to be submitted; None: not told yet
    under_way: dict[int, int] = field(default_factory=dict)  # row by ticket of the daemon; -1: all of the table


class LookedUpRows:
    """Keeps the fetches of tables. `stages`: those whose weights are fetched by rows. One thread calls all methods."""

    def __init__(self, *, model: ModelSpec, plan: Plan, daemon: SwapDaemon, memory: HostMemory) -> None:
        self._daemon, self._memory = daemon, memory
        self._tables = {
            stage.index: _table(model, stage, placed.fetched(0)[0][1])
            for stage, placed in zip(model.stages, plan.stages, strict=True)
            if placed.looked_up and placed.weights == "ssd"
        }
        self.stages = tuple(self._tables)
        self._fetches: dict[int, _Fetch] = {}
        self._open = 0  # reads under way
        self._tickets, self._by_rows, self._reads_all = FIRST_TICKET, False, False

    def fetch(self, stage: int, arena: int) -> int:
        """Begins the next fetch of a table, into the slot at `arena`. Returns its ticket."""
        table = self._tables[stage]
        self._tickets += 1
        fetch = self._fetches[self._tickets] = _Fetch(table, arena)
        if table.wanted is not None:
            self._begin(fetch)
        return self._tickets

    def tell(self, rows: Mapping[int, torch.Tensor] | None) -> None:
        """Tells the distinct rows, by stage, that the next fetch of each table needs: 1-D, in host memory; None: all of
        them."""
        for stage, table in self._tables.items():
            table.wanted = torch.arange(table.rows) if rows is None else rows[stage]
        for fetch in self._fetches.values():
            if fetch.waiting is None:
                self._begin(fetch)

    def expect_others(self) -> None:
        """Takes note that the model looks up ids that nobody told. Raises UsageError if a table was fetched by rows before."""
        if self._by_rows:
            raise UsageError("the model's own code looks up other tokens than in its first step, and their rows were not read")
        self._reads_all = True

    def give_up(self) -> None:
        """Forgets what was told, and ends fetches that were told nothing."""
        for table in self._tables.values():
            table.wanted = None
        for fetch in self._fetches.values():
            fetch.waiting = fetch.waiting or []

    def poll(self, ticket: int) -> bool | None:
        """Returns True once all rows are there; None before. Raises SwapError where a read failed, and where a row is not what
        it was."""
        fetch = self._fetches[ticket]
        for under_way, row in list(fetch.under_way.items()):
            result = self._daemon.poll(under_way)
            if result is None:
                continue
            del fetch.under_way[under_way]
            self._open -= 1
            if row < 0:
                self._keep_sums(fetch)
            elif fetch.table.sums is not None:
                self._check(fetch.table, row, result.data_sum)
        if fetch.waiting is None:
            return None
        self._submit(fetch, fetch.waiting)
        if fetch.under_way or fetch.waiting:
            return None
        del self._fetches[ticket]
        return True

    # ---- one fetch -------------------------------------------------------------------------------------------------

    def _begin(self, fetch: _Fetch) -> None:
        table = fetch.table
        assert table.wanted is not None
        if not table.was_read or self._reads_all or len(table.wanted) == table.rows:
            extent, fetch.waiting = table.extent, []
            ticket = self._daemon.read(fetch.arena, extent.offset, extent.size, priority=FETCH_PRIORITY, label=table.stage)
            fetch.under_way[ticket] = -1
            self._open += 1
        else:
            self._by_rows, fetch.waiting = True, table.apart(table.wanted)
            self._submit(fetch, fetch.waiting)
        table.wanted = None

    def _submit(self, fetch: _Fetch, waiting: list[int]) -> None:
        table = fetch.table
        while waiting and self._open < _AT_ONCE:
            row = waiting.pop()
            begin, end = table.pages(row)
            ticket = self._daemon.read(
                fetch.arena + begin, table.extent.offset + begin, end - begin,
                priority=FETCH_PRIORITY, label=table.stage, compared=False,
            )  # fmt: skip
            fetch.under_way[ticket] = row
            self._open += 1

    def _keep_sums(self, fetch: _Fetch) -> None:
        """Keeps the checksums of all rows, now that the whole table is there and was compared."""
        table = fetch.table
        table.was_read = True
        if self._daemon.written is None or table.sums is not None:
            return
        slot = self._memory.arena.view(fetch.arena, table.extent.size)
        sums = (checksum(slot[begin:end]) for begin, end in map(table.pages, range(table.rows)))
        table.sums = np.fromiter(sums, dtype=np.uint64, count=table.rows)

    def _check(self, table: Table, row: int, total: int) -> None:
        begin, end = table.pages(row)
        assert table.sums is not None and self._daemon.written is not None
        span = Span(offset=table.extent.offset + begin, size=end - begin)
        self._daemon.written.compare(span, total, int(table.sums[row]), self._daemon.label_names.get(table.stage, "a table"))


def _table(model: ModelSpec, stage: StageSpec, extent: Span) -> Table:
    (tensor,), item = stage.tensors, ITEM_SIZE[model.compute_dtype]
    rows = tensor.shape[0]
    return Table(stage.index, first=item * tensor.offset, row=item * (tensor.numel // rows), rows=rows, extent=extent)


# ---- moves ------------------------------------------------------------------------------------------------------------

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
