"""Reads of a frozen table of tokens only the rows that a step looks up, to where they lie in its slot. The rest of the slot
holds anything.

A fetch may begin before the step does: it takes its slot, and waits until it is told the rows. The first fetch of a run reads
all of the table: it is compared as a whole with what was written, and the checksums of its rows are kept for later fetches. If
the model's own code looks up other ids than the step's, this is found then, and all fetches read all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from ..core.errors import UsageError
from ..planner.layout import row_span
from ..planner.ledgers import FETCH_PRIORITY
from ..spec.model import ITEM_SIZE, PAGE, ModelSpec, StageSpec
from ..spec.plan import Plan, Span
from ..swap.daemon import SwapDaemon
from ..swap.kernels import checksum
from .context import HostMemory

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
