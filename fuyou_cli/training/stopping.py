"""Handles Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 (Slurm's, before a job's time is over) by what the run is doing. Nothing that
could be saved is lost without a warning."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Literal

from ..core.errors import Interrupted

Doing = Literal["nothing", "loading", "training", "saving", "ended"]
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_EXIT_CODE = Interrupted.exit_code


class StopRequests:
    """Sets `requested` at the first signal while training or saving, and says what a second one would lose. A second one raises
    KeyboardInterrupt, wherever the run is. While loading nothing can be lost, so the first one raises it.

    Signals are caught from enter to exit. With `to_the_end`, an exit by an error leaves them ignored, because the process is
    about to report how it ended, and to end.
    """

    def __init__(self, announce: Callable[[str], None], *, to_the_end: bool = False) -> None:
        self.requested = False
        self.may_abandon: Callable[[], bool] = lambda: True  # whether the step under way can be given up
        self.at_stake: Callable[[], str] = lambda: "this run"  # what a second signal would lose
        self._announce, self._to_the_end = announce, to_the_end
        self._doing: Doing = "nothing"
        self._before: dict[int, Any] = {}
        self._insisted = 0  # signals since `end`

    def __enter__(self) -> StopRequests:
        for number in _SIGNALS:
            # nohup sets SIGHUP to be ignored
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        ignored = kind is not None and self._to_the_end  # set in the system, because Python removes its own handlers as it ends
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if ignored else handler)

    @contextmanager
    def during(self, doing: Doing) -> Iterator[None]:
        """Gives signals the meaning they have while `doing`, inside the context. May be nested."""
        doing_before, self._doing = self._doing, doing
        try:
            yield
        finally:
            if self._doing != "ended":
                self._doing = doing_before

    def end(self) -> None:
        """Ignores signals from now on, because all that can be saved is saved. Two more Ctrl-C end a wait for a drive that may
        never answer."""
        self._doing = "ended"

    def _insist(self, number: int) -> None:
        if number == signal.SIGHUP:
            return
        self._insisted += 1
        if self._insisted > 1:
            os._exit(_EXIT_CODE)
        self._say("waiting for the drives; a second Ctrl-C ends the process at once (the committed state is safe)")

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self._doing == "ended":
            self._insist(number)
            return
        if self._doing in ("nothing", "loading"):
            raise KeyboardInterrupt
        if self.requested:
            if number == signal.SIGHUP:  # a closing terminal may send it twice
                return
            raise KeyboardInterrupt
        self.requested = True
        self._say(f"{self._what_follows()};\na second Ctrl-C loses {self.at_stake()}")

    def _what_follows(self) -> str:
        if self._doing == "saving":
            return "saving the state"
        if self.may_abandon():
            return "stopping at the next micro-batch, then saving the state"
        return "finishing this step, whose updates have begun, then saving the state"

    def _say(self, text: str) -> None:
        with suppress(RuntimeError):  # the signal came while Python was writing another line; it cannot write now
            self._announce(text)
