"""Measures the write rate that is left once a drive's fast region is full: `fuyou bench --sustained`.

It writes window after window of a new file until the rate has fallen and settled, then reads and writes at once. Writing wears
the drive, so the person agrees first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fuyou_cli.core.errors import OutOfSpaceError
from fuyou_cli.core.units import GiB, gb
from fuyou_cli.swap.daemon import SwapDaemon

from .findings import Findings, found, rate_of
from .store_rates import new_store
from .streams import IN_FLIGHT, Pace, Stream, run_streams

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
    slow = found(
        sustained_write=rate_of("store write, sustained", "B/s", list(rates[-LAST:]), note),
        sustained_read_mixed=rate_of("store read while writing, sustained", "B/s", [pace.reading for pace in mixed], note),
        sustained_write_mixed=rate_of("store write while reading, sustained", "B/s", [pace.writing for pace in mixed], note),
    )
    return slow + Findings(figures={"burst_bytes": burst_windows(rates) * WINDOW})  # bytes written before the fall


def settled(rates: Sequence[float]) -> bool:
    """Tells whether the last windows are slower than the first ones, and alike."""
    if len(rates) < LEAST_WINDOWS:
        return False
    last = rates[-LAST:]
    level = statistics.median(last)
    return level < FALLEN * statistics.median(rates[:LAST]) and max(last) - min(last) <= STEADY * level


def held(rates: Sequence[float]) -> bool:
    """Tells whether the last windows are about as fast as the first ones."""
    return len(rates) >= LEAST_WINDOWS and statistics.median(rates[-LAST:]) >= FALLEN * statistics.median(rates[:LAST])


def burst_windows(rates: Sequence[float]) -> int:
    """Returns the number of windows written before the rate fell for good; 0 if it did not."""
    if not settled(rates):
        return 0
    between = (statistics.median(rates[:LAST]) + statistics.median(rates[-LAST:])) / 2
    return 1 + max((number for number, rate in enumerate(rates) if rate > between), default=-1)


def _window(daemon: SwapDaemon, number: int) -> Pace:
    return run_streams(daemon, [Stream(kind="write", first=number * WINDOW, size=WINDOW, slot=0)], MOST_SECONDS).whole


def _mixed(daemon: SwapDaemon, number: int) -> Pace:
    """Writes a new window while the first ones are read."""
    streams = [
        Stream(kind="read", first=0, size=LAST * WINDOW, slot=IN_FLIGHT),
        Stream(kind="write", first=number * WINDOW, size=WINDOW, slot=0),
    ]
    return run_streams(daemon, streams, MOST_SECONDS).whole
