"""Measures the store through the daemon's own interface: reading, writing, and both at once."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fuyou_cli.core.errors import OutOfSpaceError, UsageError
from fuyou_cli.core.units import GiB, MiB, align_up, gb, gib
from fuyou_cli.swap.arena import Arena
from fuyou_cli.swap.daemon import Counters, DaemonOptions, SwapDaemon
from fuyou_cli.swap.store import Store

from .measure import Rate, rate_of

Direction = Literal["read", "write"]

REQUEST = 8 * MiB
IN_FLIGHT = 4  # requests of one stream
QUICK_SPAN, FULL_SPAN = 320 * MiB, 4 * GiB
QUICK_SECONDS, FULL_SECONDS = 0.6, 20.0  # of one pass at most; a slow drive gets shorter passes
QUICK_REPEATS, FULL_REPEATS = 3, 5
LEAST_SPAN = 4 * REQUEST
SPARE_DISK = GiB // 2  # never taken


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreRates:
    read: Rate
    write: Rate
    read_mixed: Rate  # while writing
    write_mixed: Rate  # while reading
    notes: tuple[str, ...]
    written_bytes: int
    io_cpu: float  # seconds of core time per byte moved

    @property
    def rates(self) -> tuple[Rate, Rate, Rate, Rate]:
        return self.read, self.write, self.read_mixed, self.write_mixed


def measure_store(*directories: Path, quick: bool, free: int) -> StoreRates:
    """Rates of a store striped over `directories`, which have `free` bytes left in all. The first pass over new files is not
    counted.

    Quick writes at most 5.5 spans of 320 MiB: 1.9 GB. Raises UsageError or OutOfSpaceError when nothing can be
    measured there.
    """
    wanted = QUICK_SPAN if quick else FULL_SPAN
    span = min(wanted, (free - SPARE_DISK) // REQUEST * REQUEST)
    named = ", ".join(map(str, directories))
    if span < LEAST_SPAN:
        raise OutOfSpaceError(
            f"{named} has {gb(free)} free: too little to measure",
            hint=f"free {gib(SPARE_DISK + LEAST_SPAN)}, or name another directory",
        )
    notes = [f"only {gib(span)} instead of {gib(wanted)} of files: {named} is short of space"] * (span < wanted)
    with new_store(directories, span) as (daemon, store):
        return _measured(daemon, store, span, quick=quick, notes=notes)


@contextmanager
def new_store(directories: Sequence[Path], size: int) -> Iterator[tuple[SwapDaemon, Store]]:
    """A store of `size` bytes striped over folders of its own in `directories`, its daemon, and an arena of two streams'
    requests that holds random bytes; all of it is gone at the end. Raises UsageError where nothing can be written."""
    folders: list[Path] = []
    try:
        for directory in directories:
            folders.append(_made_in(directory))
        with (
            Arena(2 * IN_FLIGHT * REQUEST) as arena,
            Store.open([folder / "store.bin" for folder in folders], stripe=MiB, size=size, create=True) as store,
            SwapDaemon(arena, store, DaemonOptions(block_size=MiB, update_threads=0)) as daemon,
        ):
            _fill(arena)
            yield daemon, store
    finally:
        for folder in folders:
            shutil.rmtree(folder)  # made above, by this call


def _made_in(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="fuyou-bench-", dir=directory))
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error.strerror}", hint="name another directory") from error


def _measured(daemon: SwapDaemon, store: Store, span: int, *, quick: bool, notes: list[str]) -> StoreRates:
    limit = QUICK_SECONDS if quick else FULL_SECONDS
    repeats = QUICK_REPEATS if quick else FULL_REPEATS
    if not store.direct:
        notes.append("this file system knows no direct I/O: the figures include the page cache")
    filled = _alone(daemon, "write", span, limit).finished  # files that were never written are slower: not counted
    if filled < span:
        span = max(filled, LEAST_SPAN // 2)
        notes.append(f"the drive is slow: passes of {gib(span)}")
    note = f"{daemon.backend}, {'O_DIRECT' if store.direct else 'buffered'}, {gib(span)} per pass"
    reads, writes, mixed = [], [], []
    moved, used = _moved(daemon), time.process_time()  # of every thread, the kernel's time for them included
    for _ in range(repeats):
        reads.append(_alone(daemon, "read", span, limit).reading)
        writes.append(_alone(daemon, "write", span, limit).writing)
        mixed.append(_at_once(daemon, span, limit))
    io_cpu = (time.process_time() - used) / max(1, _moved(daemon) - moved)
    store.sync()
    counters = daemon.counters()
    if quick:
        notes.append("bursts: a drive may write slower once its fast cache is full (fuyou bench --sustained measures that)")
    return StoreRates(
        read=rate_of("store read", "B/s", reads, note),
        write=rate_of("store write", "B/s", writes, note),
        read_mixed=rate_of("store read while writing", "B/s", [pace.reading for pace in mixed], note),
        write_mixed=rate_of("store write while reading", "B/s", [pace.writing for pace in mixed], note),
        notes=tuple(notes),
        written_bytes=counters.written_bytes,
        io_cpu=io_cpu,
    )


def _moved(daemon: SwapDaemon) -> int:
    counters = daemon.counters()
    return counters.read_bytes + counters.written_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    reading: float  # bytes per second
    writing: float
    finished: int  # bytes from the start of the span that are done


def _alone(daemon: SwapDaemon, kind: Direction, span: int, limit: float) -> Pace:
    return run_streams(daemon, [Stream(kind=kind, first=0, size=span, slot=0)], limit)


def _at_once(daemon: SwapDaemon, span: int, limit: float) -> Pace:
    """Reading one half while writing the other; both end when the first is through."""
    half = align_up(span // 2, REQUEST)
    streams = [
        Stream(kind="read", first=span - half, size=half, slot=IN_FLIGHT),
        Stream(kind="write", first=0, size=half, slot=0),
    ]
    return run_streams(daemon, streams, limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """Requests of one direction over [first, first + size) of the store, IN_FLIGHT at a time, through the arena's slots
    from `slot` on."""

    kind: Direction
    first: int
    size: int
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ending:
    """A stream when it stopped submitting: what the daemon had moved by then, its own and others' bytes."""

    seconds: float
    counters: Counters
    finished: int


def run_streams(daemon: SwapDaemon, streams: list[Stream], limit: float) -> Pace:
    """All streams at once until the first ends or the time is over; the daemon's counters up to that moment."""
    before, begin, ends = daemon.counters(), time.perf_counter(), threading.Event()
    with ThreadPoolExecutor(len(streams)) as pool:
        running = [pool.submit(_drive, daemon, stream, begin, limit, ends) for stream in streams]
        try:
            first = min((future.result() for future in running), key=lambda ending: ending.seconds)
        finally:
            ends.set()
    return Pace(
        reading=(first.counters.read_bytes - before.read_bytes) / first.seconds,
        writing=(first.counters.written_bytes - before.written_bytes) / first.seconds,
        finished=first.finished,
    )


def _drive(daemon: SwapDaemon, stream: Stream, begin: float, limit: float, ends: threading.Event) -> _Ending:
    submit = daemon.read if stream.kind == "read" else daemon.write
    tickets: deque[int] = deque()
    offset, finished = 0, 0
    try:
        while finished < stream.size and not ends.is_set() and time.perf_counter() - begin < limit:
            while offset < stream.size and len(tickets) < IN_FLIGHT:
                place = (stream.slot + offset // REQUEST % IN_FLIGHT) * REQUEST
                tickets.append(submit(place, stream.first + offset, REQUEST))
                offset += REQUEST
            daemon.wait(tickets.popleft())
            finished += REQUEST
        return _Ending(seconds=time.perf_counter() - begin, counters=daemon.counters(), finished=finished)
    finally:
        ends.set()
        while tickets:
            daemon.wait(tickets.popleft())


def _fill(arena: Arena) -> None:
    """Bytes that do not compress: a drive that compresses must not look faster than it is."""
    import torch

    torch.frombuffer(arena.view(0, arena.size), dtype=torch.int64).random_()
