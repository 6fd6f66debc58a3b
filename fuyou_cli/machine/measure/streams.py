"""Runs streams of requests through the daemon, and tells how fast they went over time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import linear_regression
from typing import Literal

from fuyou_cli.core.units import MiB
from fuyou_cli.swap.daemon import SwapDaemon

Direction = Literal["read", "write"]

REQUEST = 8 * MiB
IN_FLIGHT = 4  # requests of one stream
_OFTEN = 0.01  # seconds between two looks at the counters
# A drive with a limited rate or with a fast region first spends what it saved up, which a run of hours never sees again.
# This share of a short stream's time is not counted.
_SAVED_UP = 0.25
_WINDOWS = 3  # their rates show the spread


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
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
    """Holds the bytes moved so far, `seconds` after the start."""

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
    """Holds rates in both directions."""

    reading: float  # bytes per second
    writing: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """Holds what was moved from the start until the first stream ended or the time was over (the last look)."""

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
        return [other.since(one) for one, other in zip(marks, ends, strict=True) if one is not other]

    def _from(self, share: float) -> Look:
        """Finds the last look before this share of the time."""
        until = share * self.looks[-1].seconds
        return max((look for look in self.looks[:-1] if look.seconds <= until), key=lambda look: look.seconds)


def run_streams(daemon: SwapDaemon, streams: Sequence[Stream], limit: float) -> Course:
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


def _drive(daemon: SwapDaemon, stream: Stream, clock: _Clock, limit: float, ends: threading.Event) -> tuple[Look, int]:
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
