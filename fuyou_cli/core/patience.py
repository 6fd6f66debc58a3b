"""Says what a long wait is for when nothing moves. There is no thread: the waiting code looks in now and then.

A slow drive is no news, a silent one is: anything that moves starts the silence anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .units import duration

FIRST = 30.0  # seconds of silence before the first word; each further one comes after twice the silence
_LOOK = 1.0  # seconds between looks at what has moved


class Patience:
    """Watches waits. `progress` gives something that changes when anything moves; `where` says what is being done."""

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
    """Looks now and then whether anything moved during one wait."""

    def __init__(self, patience: Patience, what: str) -> None:
        self._patience, self._what = patience, what
        self._begin = self._still_since = patience.clock()
        self._next_look, self._silence = self._begin + min(_LOOK, patience.first), patience.first
        self._seen: object = self  # nothing so far

    def look(self) -> None:
        """Speaks where nothing moves for long. Called as often as anybody likes while the wait goes on."""
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
            f"waiting for {self._what}{f' ({where})' if where else ''};\n"
            f"that takes {waited} by now, the last {still} of it with nothing read, written or updated"
        )


SILENT = Patience(lambda text: None)
