"""Writes a run's newest steps as a trace: a JSON array of events that ui.perfetto.dev and chrome://tracing open.

Every resource has a track, and one more track for each of its overlapping intervals. Steps are packed as they end, so a long
run keeps only the newest ones, in little memory.
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from ..core.errors import FuyouError, UsageError
from .report import Busy

MOST_STEPS = 10
MOST_BYTES = 128 << 20  # of the file; one step is always kept, whatever its size
_TRACKS = ("step", "compute", "visit", "wait", "h2d", "d2h", "update", "update chunk", "ssd read", "ssd write")  # top to bottom
_NAMED = {"h2d": "copy up", "d2h": "copy down"}
_LANES = 1000  # lanes of one track, at most


class Trace:
    """Keeps the newest steps and writes them at the end of the context, whatever ended the run. Raises UsageError at once if
    the file cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.open("ab").close()
        except OSError as error:
            raise UsageError(f"--trace: {path} cannot be written: {error.strerror}", hint="name another file") from error
        self.seen = 0
        self.steps: deque[tuple[int, int, bytes]] = deque()  # step, bytes of JSON, packed
        self._zero: float | None = None
        self._lanes: dict[str, list[float]] = {}  # track -> when each lane is free

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.write()
        except OSError as failure:
            message = f"the trace {self.path} cannot be written: {failure.strerror}"
            if error is None:
                raise FuyouError(message) from failure
            error.add_note(message)

    def step(self, number: int, seconds: float, begin: float, items: Sequence[Busy]) -> None:
        """Adds a step that began at `begin` (monotonic), and its intervals, in seconds from then."""
        if self._zero is None:  # intervals left over from loading lie before the first step
            self._zero = begin + min((item.begin for item in items), default=0.0)
        step = Busy(resource="step", label=f"step {number}", begin=0.0, end=seconds)
        shift = begin - self._zero
        events = [self._event(item, shift, number) for item in sorted((step, *items), key=lambda item: item.begin)]
        data = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events).encode()
        self.steps.append((number, len(data), zlib.compress(data, level=1)))
        self.seen += 1
        while len(self.steps) > 1 and (len(self.steps) > MOST_STEPS or sum(size for _, size, _ in self.steps) > MOST_BYTES):
            self.steps.popleft()

    def write(self) -> None:
        """Writes the steps that are kept."""
        with self.path.open("wb") as file:
            file.write(b"[\n" + ",\n".join(json.dumps(event) for event in self._names()).encode())
            for _, _, packed in self.steps:
                file.write(b",\n" + zlib.decompress(packed))
            file.write(b"\n]\n")

    @property
    def summary(self) -> str:
        """Returns a line that says what the file holds."""
        if not self.steps:
            return f"trace: {self.path} has no step"
        first, last, left = self.steps[0][0], self.steps[-1][0], self.seen - len(self.steps)
        steps = f"step {last}" if first == last else f"steps {first} to {last}"
        if last - first + 1 != len(self.steps):
            steps = f"the last {len(self.steps)} steps of several runs"
        bound = f" (the newest: at most {MOST_STEPS} steps and {MOST_BYTES >> 20} MiB)" if left else ""
        return f"trace: {self.path} has {steps}{bound}; open it at ui.perfetto.dev"

    def _event(self, item: Busy, shift: float, step: int) -> dict[str, object]:
        span = item.end - item.begin
        arguments: dict[str, object] = {"bytes": item.bytes} if item.bytes else {}
        if item.bytes and span > 0:
            arguments["GB/s"] = round(item.bytes / span / 1e9, 3)
        return {
            "name": item.label,
            "cat": item.resource,
            "ph": "X",
            "ts": round((shift + item.begin) * 1e6, 3),
            "dur": round(span * 1e6, 3),
            "pid": 1,
            "tid": self._thread(item.resource, self._lane(item.resource, shift + item.begin, shift + item.end)),
            "args": {"step": step, **arguments},
        }

    def _lane(self, track: str, begin: float, end: float) -> int:
        """Returns the first free lane. Intervals of one lane do not overlap."""
        lanes = self._lanes.setdefault(track, [])
        lane = next((number for number, free in enumerate(lanes) if free <= begin), len(lanes))
        lanes[lane : lane + 1] = [end]
        return lane

    def _thread(self, track: str, lane: int) -> int:
        return _LANES * (_TRACKS.index(track) + 1) + lane

    def _names(self) -> Iterable[dict[str, object]]:
        yield {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "fuyou"}}
        for track, lanes in self._lanes.items():
            for lane in range(len(lanes)):
                place, name = {"ph": "M", "pid": 1, "tid": self._thread(track, lane)}, _NAMED.get(track, track)
                yield {"name": "thread_name", **place, "args": {"name": f"{name} {lane + 1}" if lane else name}}
                yield {"name": "thread_sort_index", **place, "args": {"sort_index": self._thread(track, lane)}}
