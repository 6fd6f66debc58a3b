"""Measures the store through the daemon's own interface: reading, writing, and both at once."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Literal, NamedTuple

from fuyou_cli.core.errors import OutOfSpaceError
from fuyou_cli.core.process import uninterrupted
from fuyou_cli.core.units import GiB, MiB, align_up, gb, gib
from fuyou_cli.swap.arena import Arena
from fuyou_cli.swap.daemon import DaemonOptions, SwapDaemon
from fuyou_cli.swap.store import Store

from ..scratch import scratch_folder
from .findings import Findings, Rate, found, rate_of
from .streams import IN_FLIGHT, REQUEST, Course, Direction, Stream, run_streams

QUICK_SPAN, FULL_SPAN = 320 * MiB, 4 * GiB
LEAST_SPAN = 2 * IN_FLIGHT * REQUEST  # so that each request in flight has its own place in either half
SPARE_DISK = GiB // 2  # bytes never used
LOST_QUICK_SECONDS, LOST_FULL_SECONDS = 0.3, 3.0  # compute alone, then compute beside reads
_TURNS = 4

Step = Callable[[], object]


class _Effort(NamedTuple):
    """Tells how many spans a pass moves (one way, and both at once) and the most seconds it takes."""

    alone: tuple[float, float]
    mixed: tuple[float, float]
    repeats: int


# One long pass of each kind: between short passes a drive with a limited rate saves up for a burst.
QUICK = _Effort(alone=(1.6, 1.0), mixed=(2.8, 1.6), repeats=1)
FULL = _Effort(alone=(1.0, 20.0), mixed=(1.0, 20.0), repeats=3)


def measure_store(*directories: Path, quick: bool, free: int, step: Step | None = None) -> Findings:
    """Measures a store striped over `directories`, which have `free` bytes left in all; quick writes at most 1.9 GB.

    `step` computes on the same cores, to measure what transfers take from compute. Raises UsageError or OutOfSpaceError.
    """
    wanted = QUICK_SPAN if quick else FULL_SPAN
    span = min(wanted, (free - SPARE_DISK) // REQUEST * REQUEST)
    named = ", ".join(map(str, directories))
    if span < LEAST_SPAN:
        raise OutOfSpaceError(
            f"{named} has only {gb(free)} free, too little to measure",
            hint=f"free {gib(SPARE_DISK + LEAST_SPAN)}, or name another directory",
        )
    notes = [f"files of only {gib(span)} instead of {gib(wanted)}: {named} has little free space"] * (span < wanted)
    if quick:
        notes.append("bursts: a drive may slow down once its fast cache is full (`fuyou bench --sustained` measures that)")
    with new_store(directories, span) as (daemon, store):
        rates = _measured(daemon, store, span, effort=QUICK if quick else FULL, notes=notes)
        if step is None:
            return rates
        lost = compute_lost(daemon, span, step, seconds=LOST_QUICK_SECONDS if quick else LOST_FULL_SECONDS)
        return rates + Findings(figures={"io_cpu": max(rates.figures["io_cpu"], lost)})


def compute_lost(daemon: SwapDaemon, span: int, step: Step, *, seconds: float) -> float:
    """Measures the seconds of compute lost per byte read at the same time: threads wait for one that is interrupted."""
    alone = beside = moved = beside_seconds = 0.0
    step()
    for _ in range(_TURNS):
        alone += _pace(step, seconds)
        with _reading(daemon, span):
            before, begin = _moved(daemon), time.perf_counter()
            beside += _pace(step, seconds)
            moved += _moved(daemon) - before
            beside_seconds += time.perf_counter() - begin
    rate = moved / beside_seconds
    return max(0.0, 1 - beside / alone) / rate if rate and alone else 0.0


def _pace(step: Step, seconds: float) -> float:
    """Measures steps per second."""
    done, begin = 0, time.perf_counter()
    while not done or time.perf_counter() - begin < seconds:
        step()
        done += 1
    return done / (time.perf_counter() - begin)


@contextmanager
def _reading(daemon: SwapDaemon, span: int) -> Iterator[None]:
    """Reads [0, span) of the store again and again, in requests so large that they need nearly no time in Python."""
    over, size = threading.Event(), min(IN_FLIGHT * REQUEST, span // 2)

    def read() -> None:
        under_way: deque[int] = deque()
        for turn in count():
            if over.is_set():
                break
            begin = turn * size % (span - size) // REQUEST * REQUEST
            under_way.append(daemon.read(turn % 2 * IN_FLIGHT * REQUEST, begin, size))
            if len(under_way) == 2:
                daemon.wait(under_way.popleft())
        for ticket in under_way:
            daemon.wait(ticket)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            yield
        finally:
            over.set()
        reading.result()


@contextmanager
def new_store(directories: Sequence[Path], size: int) -> Iterator[tuple[SwapDaemon, Store]]:
    """Opens a store of `size` bytes striped over new folders, and its daemon, and removes them at the end. Raises
    UsageError."""
    with ExitStack() as stack:
        with uninterrupted():
            folders = [stack.enter_context(scratch_folder(directory)) for directory in directories]
            arena = stack.enter_context(Arena(2 * IN_FLIGHT * REQUEST))
            paths = [folder / "store.bin" for folder in folders]
            store = stack.enter_context(Store.open(paths, stripe=MiB, size=size, create=True))
            daemon = stack.enter_context(SwapDaemon(arena, store, DaemonOptions(block_size=MiB, update_threads=0)))
        _fill(arena)
        yield daemon, store


def _measured(daemon: SwapDaemon, store: Store, span: int, *, effort: _Effort, notes: list[str]) -> Findings:
    if not store.direct:
        notes.append("this file system has no direct I/O: the figures include the page cache")
    # Files are slower until written once: this pass does not count.
    filled = _pass(daemon, span, (1.0, effort.alone[1]), "write").finished
    if filled < span:
        span = max(filled, LEAST_SPAN)
        notes.append(f"the drive is slow: passes over {gib(span)}")
    reads, writes, mixed = [], [], []
    moved, used = _moved(daemon), _others_time()
    for _ in range(effort.repeats):
        reads.append(_pass(daemon, span, effort.alone, "read"))
        writes.append(_pass(daemon, span, effort.alone, "write"))
        mixed.append(_pass(daemon, span, effort.mixed, "write", "read"))
    io_cpu = (_others_time() - used) / max(1, _moved(daemon) - moved)
    store.sync()
    note = f"{daemon.backend}, {'O_DIRECT' if store.direct else 'buffered'}, files of {gib(span)}"
    rates = found(
        store_read=_rate("store read", reads, "reading", note),
        store_write=_rate("store write", writes, "writing", note),
        store_read_mixed=_rate("store read while writing", mixed, "reading", note),
        store_write_mixed=_rate("store write while reading", mixed, "writing", note),
    )
    written = daemon.counters().written_bytes
    return rates + Findings(figures={"io_cpu": io_cpu}, notes=tuple(notes), written_bytes=written)


def _others_time() -> float:
    """Returns the core time of all threads but this one, which only watches. The kernel's threads are included."""
    return time.process_time() - time.thread_time()


def _moved(daemon: SwapDaemon) -> int:
    counters = daemon.counters()
    return counters.read_bytes + counters.written_bytes


def _pass(daemon: SwapDaemon, span: int, much: tuple[float, float], *kinds: Direction) -> Course:
    """Runs a pass over this many spans for at most this many seconds: all files one way, or one half each way."""
    total, part = align_up(int(much[0] * span), REQUEST), align_up(span // len(kinds), REQUEST)
    streams = [
        Stream(kind=kind, first=(span - part) * index, size=part, slot=IN_FLIGHT * index, total=total)
        for index, kind in enumerate(kinds)
    ]
    return run_streams(daemon, streams, much[1])


def _rate(name: str, courses: list[Course], direction: Literal["reading", "writing"], note: str) -> Rate:
    """Returns the rate of everything moved while it counted. A window in which no request ended is too short."""
    windows = [rate for course in courses for window in course.windows if (rate := getattr(window, direction))]
    settled = statistics.median(getattr(course.settled, direction) for course in courses)
    return replace(rate_of(name, "B/s", [*windows, settled], note), value=settled, repeats=len(courses))


def _fill(arena: Arena) -> None:
    """Fills memory with bytes that do not compress: a drive that compresses must not look faster than it is."""
    import torch

    torch.frombuffer(arena.view(0, arena.size), dtype=torch.int64).random_()
