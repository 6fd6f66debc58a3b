"""Measures the store through the daemon's own interface: reading, writing, both at once, and the write rate that is left once a
drive's fast region is full (`fuyou bench --sustained`)."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import linear_regression
from typing import Literal, NamedTuple

from fuyou_cli.core.errors import OutOfSpaceError
from fuyou_cli.core.paths import scratch_folder
from fuyou_cli.core.process import uninterrupted
from fuyou_cli.core.units import GiB, MiB, align_up, gb, gib
from fuyou_cli.swap.daemon import DaemonOptions, SwapDaemon
from fuyou_cli.swap.store import Arena, Store

from .timing import Findings, Rate, findings, rate_of

# ---- streams of requests ---------------------------------------------------------------------------------------------


Direction = Literal["read", "write"]

REQUEST = 8 * MiB
IN_FLIGHT = 4  # requests of one stream
_OFTEN = 0.01  # seconds between two looks at the counters
# A drive with a limited rate or with a fast region first spends what it saved up, which a run of hours never sees again.
# This share of a short stream's time is not counted.
_SAVED_UP = 0.25
_WINDOWS = 3  # their rates show the spread


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestStream:
    """Describes requests over [first, first + size) of the store until `total` bytes have passed (None: once).

    IN_FLIGHT of them run at a time, through the arena's slots from `slot` on.
    """

    kind: Direction
    first: int
    size: int
    slot: int
    total: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """The bytes moved so far, `seconds` after the start."""

    seconds: float
    read_bytes: int
    written_bytes: int

    def since(self, other: Look) -> Pace:
        """Computes the rates since another look."""
        read, written = self.read_bytes - other.read_bytes, self.written_bytes - other.written_bytes
        seconds = self.seconds - other.seconds
        return Pace(reading=read / seconds, writing=written / seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Rates in both directions."""

    reading: float  # bytes per second
    writing: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """What was moved from the start until the first stream ended or the time was over (the last look)."""

    looks: tuple[Look, ...]
    finished: int  # bytes of the stream that ended first

    @property
    def whole(self) -> Pace:
        return self.looks[-1].since(self.looks[0])

    @property
    def settled(self) -> Pace:
        """Fits a line through all looks after the initial burst: a drive with a limited rate gives its bytes in lumps."""
        counted = self.looks[self.looks.index(self._from(_SAVED_UP)) :]
        seconds = [look.seconds for look in counted]
        return Pace(
            reading=linear_regression(seconds, [look.read_bytes for look in counted]).slope,
            writing=linear_regression(seconds, [look.written_bytes for look in counted]).slope,
        )

    @property
    def windows(self) -> list[Pace]:
        """Computes the same for a few parts of the time."""
        marks = [self._from(_SAVED_UP + (1 - _SAVED_UP) * number / _WINDOWS) for number in range(_WINDOWS)]
        ends = [*marks[1:], self.looks[-1]]
        return [last.since(first) for first, last in zip(marks, ends, strict=True) if first is not last]

    def _from(self, share: float) -> Look:
        """Finds the last look before this share of the time."""
        until = share * self.looks[-1].seconds
        return max((look for look in self.looks[:-1] if look.seconds <= until), key=lambda look: look.seconds)


def run_streams(daemon: SwapDaemon, streams: Sequence[RequestStream], limit: float) -> Course:
    """Runs all streams at once until the first ends or `limit` seconds are over, and watches the daemon's counters."""
    clock = _Clock(daemon)
    looks, ends = [Look(seconds=0.0, read_bytes=0, written_bytes=0)], threading.Event()
    with ThreadPoolExecutor(len(streams)) as pool:
        running = [pool.submit(_drive, daemon, stream, clock, limit, ends) for stream in streams]
        try:
            while not ends.wait(_OFTEN):
                looks.append(clock.look())
            last, finished = min((future.result() for future in running), key=lambda ending: ending[0].seconds)
        finally:
            ends.set()
    return Course(looks=(*(look for look in looks if look.seconds < last.seconds), last), finished=finished)


class _Clock:
    """Reads a daemon's counters relative to its start."""

    def __init__(self, daemon: SwapDaemon) -> None:
        self._daemon, self._before, self._begin = daemon, daemon.counters(), time.perf_counter()

    def look(self) -> Look:
        counters, before = self._daemon.counters(), self._before
        return Look(
            seconds=self.seconds(),
            read_bytes=counters.read_bytes - before.read_bytes,
            written_bytes=counters.written_bytes - before.written_bytes,
        )

    def seconds(self) -> float:
        return time.perf_counter() - self._begin


def _drive(daemon: SwapDaemon, stream: RequestStream, clock: _Clock, limit: float, ends: threading.Event) -> tuple[Look, int]:
    """Submits requests until the stream ends. Returns the time it stopped submitting, and what was done by then."""
    submit = daemon.read if stream.kind == "read" else daemon.write
    total = stream.size if stream.total is None else stream.total
    tickets: deque[int] = deque()
    offset, finished = 0, 0
    try:
        while finished < total and not ends.is_set() and clock.seconds() < limit:
            while offset < total and len(tickets) < IN_FLIGHT:
                place = (stream.slot + offset // REQUEST % IN_FLIGHT) * REQUEST
                tickets.append(submit(place, stream.first + offset % stream.size, REQUEST))
                offset += REQUEST
            daemon.wait(tickets.popleft())
            finished += REQUEST
        return clock.look(), finished
    finally:
        ends.set()
        while tickets:
            daemon.wait(tickets.popleft())


# ---- rates of a store ------------------------------------------------------------------------------------------------


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
    alone = shared = moved = shared_seconds = 0.0
    step()
    for _ in range(_TURNS):
        alone += _pace(step, seconds)
        with _reading(daemon, span):
            before, begin = _moved(daemon), time.perf_counter()
            shared += _pace(step, seconds)
            moved += _moved(daemon) - before
            shared_seconds += time.perf_counter() - begin
    rate = moved / shared_seconds
    return max(0.0, 1 - shared / alone) / rate if rate and alone else 0.0


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
    rates = findings(
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
        RequestStream(kind=kind, first=(span - part) * index, size=part, slot=IN_FLIGHT * index, total=total)
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


# ---- the sustained rate ----------------------------------------------------------------------------------------------


WINDOW = GiB
LEAST_WINDOWS = 8
MOST_BYTES = 512 * 10**9  # per drive: larger than the fast region of drives of 2 TB
MOST_SECONDS = 20 * 60.0
FALLEN = 0.75  # of the first windows' rate: the fast region is full
STEADY = 0.2  # the rate has settled when the last windows differ by at most this share of their median
LAST = 4  # windows compared
MIXED_WINDOWS = 2


def most_written(free: int, count: int = 1) -> int:
    """Returns the most bytes written on `count` drives, a quarter of what is free. Raises OutOfSpaceError if that is too
    little."""
    windows = min(free // 4, count * MOST_BYTES) // WINDOW
    if windows < LEAST_WINDOWS + MIXED_WINDOWS:
        needed = 4 * (LEAST_WINDOWS + MIXED_WINDOWS) * WINDOW
        raise OutOfSpaceError(f"only {gb(free)} free, too little to find the sustained write rate", hint=f"free {gb(needed)}")
    return windows * WINDOW


def measure_sustained(
    *directories: Path, free: int, count: int = 1, progress: Callable[[str], None] = lambda _: None
) -> Findings:
    """Measures writing over `directories`, on `count` drives, when their fast regions are full.

    Returns the rates after a fall; or `steady_bytes`, the bytes written without a fall, as proof that there is none; or
    neither. Raises UsageError or OutOfSpaceError.
    """
    size = most_written(free, count)
    with new_store(directories, size) as (daemon, store):
        begin = time.monotonic()
        rates: list[float] = []
        while (len(rates) + MIXED_WINDOWS) * WINDOW < size and not settled(rates) and time.monotonic() - begin < MOST_SECONDS:
            rates.append(_window(daemon, len(rates)).writing)
            progress(f"sustained writing: {gb(len(rates) * WINDOW)} at {gb(rates[-1])}/s")
        fallen = _fallen(daemon, rates) if settled(rates) else Findings()
        store.sync()
        largest = (len(rates) + MIXED_WINDOWS + 1) * WINDOW > count * MOST_BYTES  # the proof asked of any drive
        steady = len(rates) * WINDOW if largest and held(rates) else 0
        notes = [] if store.direct else ["this file system has no direct I/O: sustained rates include the page cache"]
        if not fallen.rates:
            found_out = "plans assume that it never falls" if steady else "the sustained rate stays unknown"
            notes.append(f"the write rate did not fall and settle within {gb(len(rates) * WINDOW)}: {found_out}")
        written = daemon.counters().written_bytes
        return fallen + Findings(figures={"steady_bytes": steady}, notes=tuple(notes), written_bytes=written)


def _fallen(daemon: SwapDaemon, rates: Sequence[float]) -> Findings:
    """Rates the windows that have settled, and measures reading and writing at once."""
    mixed = [_mixed(daemon, len(rates) + number) for number in range(MIXED_WINDOWS)]
    note = f"after {gb((len(rates) - LAST) * WINDOW)}"
    slow = findings(
        sustained_write=rate_of("store write, sustained", "B/s", list(rates[-LAST:]), note),
        sustained_read_mixed=rate_of("store read while writing, sustained", "B/s", [pace.reading for pace in mixed], note),
        sustained_write_mixed=rate_of("store write while reading, sustained", "B/s", [pace.writing for pace in mixed], note),
    )
    return slow + Findings(figures={"burst_bytes": burst_windows(rates) * WINDOW})  # bytes written before the fall


def settled(rates: Sequence[float]) -> bool:
    """Whether the last windows are slower than the first ones, and alike."""
    if len(rates) < LEAST_WINDOWS:
        return False
    last = rates[-LAST:]
    level = statistics.median(last)
    return level < FALLEN * statistics.median(rates[:LAST]) and max(last) - min(last) <= STEADY * level


def held(rates: Sequence[float]) -> bool:
    """Whether the last windows are about as fast as the first ones."""
    return len(rates) >= LEAST_WINDOWS and statistics.median(rates[-LAST:]) >= FALLEN * statistics.median(rates[:LAST])


def burst_windows(rates: Sequence[float]) -> int:
    """Returns the number of windows written before the rate fell for good; 0 if it did not."""
    if not settled(rates):
        return 0
    between = (statistics.median(rates[:LAST]) + statistics.median(rates[-LAST:])) / 2
    return 1 + max((number for number, rate in enumerate(rates) if rate > between), default=-1)


def _window(daemon: SwapDaemon, number: int) -> Pace:
    return run_streams(daemon, [RequestStream(kind="write", first=number * WINDOW, size=WINDOW, slot=0)], MOST_SECONDS).whole


def _mixed(daemon: SwapDaemon, number: int) -> Pace:
    """Writes a new window while the first ones are read."""
    streams = [
        RequestStream(kind="read", first=0, size=LAST * WINDOW, slot=IN_FLIGHT),
        RequestStream(kind="write", first=number * WINDOW, size=WINDOW, slot=0),
    ]
    return run_streams(daemon, streams, MOST_SECONDS).whole
