"""Feeds a run with rows that are made while it trains (`dataset.streaming`): the first step does not wait for all the data.

The samples of an entry become parts (`worker.Parts`), in the order of its files. A part is the folder
`<fingerprint>/<entry>-<part>` below the cache. Rows are shuffled within a part, and the entry's files among each other. One
part is made ahead. So the rows of step n are a function of seed and data. A resumed run finds the parts of an earlier process.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
import time
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuyou_cli.core.errors import DataError, FuyouError, OutOfSpaceError, UsageError
from fuyou_cli.core.units import MiB, gb

from .batches import DatasetMixture, Sampler, permutation
from .cache import (
    RowsRequest,
    WorkerProcess,
    fingerprint,
    naming_space,
    rename_unless_made,
    request_for,
    request_line,
    scratch_of,
)
from .reading import naming
from .rows import DataSummary, Rows
from .sources import Say, is_remote, may_ask
from .worker import PART_SAMPLES, PART_TOKENS, Position, read_next

WORKER_BYTES = 384 * MiB  # beside the run: Python, the tokenizer with a large vocabulary, the samples it works on
_LOOKED_AT, _LOOKS = MiB // 64, 128  # bytes of a file, at so many places, that tell whether it is the same
_LOOK, _PATIENCE = 0.2, 5.0  # seconds between looks at whether a wait is given up; that a step waits before it is said


class Stream:
    """Is the rows of a run and their order in one. An index stands for a place in the endless sequence of an entry."""

    peak_bytes = WORKER_BYTES + Sampler.PEAK_BYTES * PART_SAMPLES  # at most, with the process that tokenises

    def __init__(
        self,
        asked: RowsRequest,
        *,
        cache_dir: Path,
        batch_size: int,
        seed: int,
        check: Callable[[DataSummary], None],
        say: Say,
        part_tokens: int = PART_TOKENS,
    ) -> None:
        """Makes the first part of every entry. `check` refuses a part whose tokens do not fit the model. Raises UsageError."""
        dataset, (request, paths) = asked.dataset, request_for(asked, fetching=say)
        request["part_tokens"] = part_tokens
        if dataset.shuffle:
            for number, source in enumerate(request["sources"]):
                order_of_files = permutation(len(source["files"]), seed=seed, epoch=0, entry=number, part=1 << 62)
                source["files"] = [source["files"][place] for place in order_of_files]
        self.fingerprint = fingerprint(request, _sampled_content)
        numbers = list(range(len(request["sources"])))
        groups = [[number] for number in numbers] if dataset.weights else [numbers]
        folder = cache_dir / self.fingerprint
        held = ExitStack()
        weakref.finalize(self, held.close)
        takes = f"so 1,000 steps up to {gb(1000 * batch_size * dataset.max_seq_len * 5)}"
        with naming_space(cache_dir, takes):
            scratch = held.enter_context(scratch_of(cache_dir))
            folder.mkdir(exist_ok=True)
        request["remote"] = {"folder": str(scratch / "files"), "offline": not may_ask()}
        worker = _Worker(request, scratch, takes, threads=dataset.num_workers or 1)
        held.callback(worker.end)

        @lru_cache(maxsize=4)
        def order(rows: int, epoch: int, entry: int, part: int) -> Sequence[int] | NDArray[np.int64]:
            return permutation(rows, seed=seed, epoch=epoch, entry=entry, part=part) if dataset.shuffle else range(rows)

        self._entries = [_Entry(n, group, folder, paths, worker, order, check, say) for n, group in enumerate(groups)]
        self._mixture = DatasetMixture(dataset.weights) if len(groups) > 1 else None
        self._batch_size = batch_size
        self._last: tuple[int, list[int]] = (-1, [])
        self.summary = replace(_together([entry.first for entry in self._entries]), digest=self.fingerprint, streamed=True)

    def note(self, steps: int, epochs: int | None) -> None:
        """Notes nothing: how often a row is seen is not known before the data has ended."""

    def entry_epochs(self, steps: int) -> None:
        """Returns nothing, as `note` does."""

    def is_ready(self, step: int, is_given_up: Callable[[], bool]) -> bool:
        """Waits until the rows of global step `step` are made. Returns False if the wait was given up. Raises DataError."""
        many = len(self._entries)
        return all(self._entries[index % many].reach(index // many, is_given_up) for index in self.batch(step))

    def batch(self, step: int) -> list[int]:
        """Returns the row indices of global step `step`."""
        if self._last[0] != step:
            self._last = step, self._chosen(step)
        return self._last[1]

    def _chosen(self, step: int) -> list[int]:
        position, size, many = step * self._batch_size, self._batch_size, len(self._entries)
        if self._mixture is None:
            return list(range(position, position + size))
        given, entries = self._mixture.picks(position, size)
        chosen = []
        for entry in entries:
            chosen.append(given[entry] * many + entry)
            given[entry] += 1
        return chosen

    def tokens(self, index: int) -> NDArray[np.int32]:
        rows, row = self._row(index)
        return rows.tokens(row)

    def mask(self, index: int) -> NDArray[np.uint8]:
        rows, row = self._row(index)
        return rows.mask(row)

    def documents(self, index: int) -> list[int] | None:
        rows, row = self._row(index)
        return rows.documents(row)

    def _row(self, index: int) -> tuple[Rows, int]:
        position, entry = divmod(index, len(self._entries))
        self._entries[entry].reach(position)
        return self._entries[entry].row(position)


class _Entry:
    """The parts of one entry that are made so far. The next one is made ahead."""

    def __init__(
        self,
        number: int,
        sources: list[int],
        folder: Path,
        paths: Sequence[str],
        worker: _Worker,
        order: Callable[[int, int, int, int], Sequence[int] | NDArray[np.int64]],
        check: Callable[[DataSummary], None],
        say: Say,
    ) -> None:
        self._number, self._sources, self._folder = number, sources, folder
        self._worker, self._order, self._check, self._say = worker, order, check, say
        self._ends: list[int] = []  # rows of all parts up to this one
        self._begin: Position | None = None  # where the next part begins
        self._formats: Mapping[str, str] = {}  # of the sources read so far, by their number
        self._is_whole = False
        self._ahead: Future[int] = self._make()
        self._open = lru_cache(maxsize=4)(lambda part: Rows(self._place(part), paths=paths))
        self._grow()
        self.first: DataSummary = self._open(0).summary

    def reach(self, position: int, is_given_up: Callable[[], bool] = lambda: False) -> bool:
        """Has parts made until this place of the sequence is in one. Returns False if the wait was given up."""
        begin, announced = time.monotonic(), False
        while not self._is_whole and position >= self._ends[-1]:
            if not wait([self._ahead], _LOOK).done:
                if is_given_up():
                    return False
                if not announced and time.monotonic() - begin > _PATIENCE:
                    announced = True
                    self._say("training waits for data: it is fetched or tokenised more slowly than it is used")
                continue
            self._grow()
        return True

    def row(self, position: int) -> tuple[Rows, int]:
        """Returns the part with this place of the sequence, and the row in it."""
        epoch, within = divmod(position, self._ends[-1]) if self._is_whole else (0, position)
        part = bisect_right(self._ends, within)
        begin = self._ends[part - 1] if part else 0
        return self._open(part), int(self._order(self._ends[part] - begin, epoch, self._number, part)[within - begin])

    def _place(self, part: int) -> Path:
        return self._folder / f"{self._number}-{part:06d}"

    def _make(self) -> Future[int]:
        """Begins to make the next part, unless an earlier process has. The result is its number of rows, 0 behind the last."""
        begin = None if self._begin is None else asdict(self._begin)
        asked = {"entry": self._number, "sources": self._sources, "begin": begin, "formats": dict(self._formats)}
        return self._worker.make(asked, self._place(len(self._ends)))

    def _grow(self) -> None:
        """Takes the part that was made ahead, and begins the one after it."""
        try:
            count = self._ahead.result()
        except UsageError as error:
            if not self._ends:
                raise
            raise DataError(error.message, hint=error.hint) from error
        if not count:
            self._is_whole = True
            return
        part = len(self._ends)
        rows = self._open(part)
        try:
            self._check(rows.summary)
        except UsageError as error:
            raise (DataError if self._ends else UsageError)(error.message, hint=error.hint) from error
        self._ends.append(len(rows) + (self._ends[-1] if self._ends else 0))
        self._begin, self._formats = read_next(self._place(part))
        self._is_whole = self._begin is None
        if not self._is_whole:
            self._ahead = self._make()


class _Worker:
    """The process that makes parts, started when the first is asked for."""

    def __init__(self, request: dict[str, Any], scratch: Path, takes: str, *, threads: int) -> None:
        self._request, self._threads = request, threads
        self._scratch, self._takes = scratch, takes
        self._process: WorkerProcess | None = None
        self._has_ended = False
        self._turns: SimpleQueue[tuple[Future[int], dict[str, Any], Path] | None] = SimpleQueue()
        # A daemon, unlike a pool's: the end of this process must not wait for a file that is being fetched.
        threading.Thread(target=self._take_turns, name="data", daemon=True).start()

    def make(self, asked: dict[str, Any], folder: Path) -> Future[int]:
        """Has a part made in a folder, which appears complete or not at all. The future holds its rows, or the error."""
        future: Future[int] = Future()
        self._turns.put((future, asked, folder))
        return future

    def _take_turns(self) -> None:
        for future, asked, folder in iter(self._turns.get, None):
            try:
                with naming_space(folder.parents[1], self._takes):
                    count = self._made(asked, folder)
                future.set_result(count)
            except (FuyouError, OSError, ValueError) as error:
                future.set_exception(error)
            finally:
                if not future.done():  # a bug ends this thread, so that nobody may wait for it
                    self._give_up(future)

    def _give_up(self, future: Future[int] | None) -> None:
        """Fails this part and all that are waited for behind it."""
        while future is not None:
            future.set_exception(FuyouError("the thread that asks for data has ended; this is a bug in fuyou"))
            waiting = None if self._turns.empty() else self._turns.get()
            future = waiting[0] if waiting else None

    def end(self) -> None:
        """Ends the process, so that nothing waits for a part that nobody needs."""
        self._has_ended = True
        self._turns.put(None)
        if self._process is not None:
            self._process.end()  # with the process that fetches a file

    def _made(self, asked: dict[str, Any], folder: Path) -> int:
        if folder.is_dir():
            return 1
        try:
            return self._answered(asked, folder)
        except FuyouError as error:
            lives = self._process is not None and self._process.poll() is None  # it has told what is wrong, as with the network
            if isinstance(error, UsageError | OutOfSpaceError) or self._has_ended or lives:
                raise
            if self._process is not None:
                self._process.end()
            self._process = None  # it was ended, as by the kernel where memory is short: another one makes the same part
            return self._answered(asked, folder)

    def _answered(self, asked: dict[str, Any], folder: Path) -> int:
        # What is left in it goes with the scratch folder, and no error of that takes the place of another.
        with tempfile.TemporaryDirectory(dir=self._scratch, ignore_cleanup_errors=True) as place:
            out, at = Path(place, "rows"), Path(place, "at")
            out.mkdir()
            if self._process is None:
                self._process = WorkerProcess(self._threads)
                self._process.answer(request_line({**self._request, "at": str(at)}), at=at)
            rows = int(self._process.answer(json.dumps({**asked, "out": str(out)}) + "\n", at=at)["rows"])
            if rows:
                rename_unless_made(out, folder)
            return rows


def _sampled_content(file: Path) -> str:
    """Names a file by its size and some of its bytes: reading all of a large one takes minutes. The name of one of the hub says
    which it is."""
    if is_remote(file):
        return str(file)
    with naming(file), file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        digest = hashlib.sha256()
        for look in range(_LOOKS):
            stream.seek(max(0, size - _LOOKED_AT) * look // (_LOOKS - 1))
            digest.update(stream.read(_LOOKED_AT))
    return f"{size} {digest.hexdigest()}"


def _together(summaries: Sequence[DataSummary]) -> DataSummary:
    """Describes the first parts of all entries as one."""
    first = summaries[0]
    most = ("longest_row", "highest_token_id", "longest")
    counts = [field.name for field in fields(first) if type(getattr(first, field.name)) is int and field.name != "pad_id"]
    found = {name: (max if name in most else sum)(getattr(one, name) for one in summaries) for name in counts}
    noted: Counter[str] = sum((Counter(one.noted) for one in summaries), Counter())
    noted_at = {kind: place for one in reversed(summaries) for kind, place in one.noted_at.items()}
    lengths = [one.lengths for one in summaries]
    return replace(
        first,
        **found,
        formats=tuple(pair for one in summaries for pair in one.formats),
        entry_rows=tuple(one.rows for one in summaries),
        noted=dict(noted),
        noted_at=noted_at,
        never_stops=any(one.never_stops for one in summaries),
        lengths=[sum(sizes[k] for sizes in lengths if k < len(sizes)) for k in range(max(map(len, lengths)))],
    )
