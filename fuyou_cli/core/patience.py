"""Says what a long wait is for when nothing moves. There is no thread: the waiting code calls `look` now and then.

A slow drive is normal, a silent one is not. Anything that moves restarts the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .units import duration

FIRST = 30.0  # seconds of silence before the first message; each further one comes after twice the silence
_LOOK = 1.0  # seconds between checks of what has moved


class Patience:
    """Watches waits. `progress` returns a value that changes when anything moves. `where` returns what is being done."""

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        progress: Callable[[], object] = lambda: None,
        where: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
        first: float | None = None,
    ) -> None:
        self.say, self.progress, self.where, self.clock = say, progress, where, clock
        self.first = FIRST if first is None else first

    def waiting(self, what: str) -> Wait:
        """Begins one wait."""
        return Wait(self, what)


class Wait:
    """Checks now and then whether anything moved during one wait."""

    def __init__(self, patience: Patience, what: str) -> None:
        self._patience, self._what = patience, what
        self._begin = self._still_since = patience.clock()
        self._next_look, self._silence = self._begin + min(_LOOK, patience.first), patience.first
        self._seen: object = self  # a value that nothing equals

    def look(self) -> None:
        """Says something if nothing has moved for long. Cheap, so call it as often as you like during the wait."""
        patience, now = self._patience, self._patience.clock()
        if now < self._next_look:
            return
        self._next_look = now + min(_LOOK, patience.first)
        seen = patience.progress()
        if seen != self._seen:
            self._seen, self._still_since, self._silence = seen, now, patience.first
        elif now - self._still_since >= self._silence:
            self._silence *= 2
            self._speak(now)

    def _speak(self, now: float) -> None:
        where = self._patience.where()
        waited, still = duration(now - self._begin), duration(now - self._still_since)
        self._patience.say(
            f"waiting for {self._what}{f' ({where})' if where else ''} for {waited};\n"
            f"nothing was read, written or updated for {still}"
        )


SILENT = Patience(lambda text: None)
