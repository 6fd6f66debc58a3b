"""The process's memory over time, sampled beside the computation."""

from __future__ import annotations

import threading
from collections.abc import Callable

_SAMPLE_SECONDS = 0.02


class MemoryWatch:
    """Samples the process's memory from a thread of its own, so that peaks inside a computation are seen. `highest` gives what
    the kernel has seen at most since it was asked last, 0 where it does not tell."""

    def __init__(self, now: Callable[[], int], highest: Callable[[], int] = lambda: 0) -> None:
        self._now, self._highest = now, highest
        highest()  # what was before is not of this run
        self.peak = self._since = now()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def look(self) -> int:
        """Bytes now, which no peak seen later is below."""
        with self._lock:
            now = self._now()
            self.peak, self._since = max(self.peak, now), max(self._since, now)
        return now

    def reached(self) -> int:
        """Bytes at most since this was asked last."""
        with self._lock:
            now = self._now()
            reached = max(now, self._since, self._highest())
            self.peak, self._since = max(self.peak, reached), now
        return reached

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            self.look()

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
