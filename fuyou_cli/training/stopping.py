"""Takes Ctrl-C, SIGTERM and SIGHUP by what the run is doing: nothing that is or could be saved is lost unannounced."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Literal

from ..core.errors import Interrupted

Doing = Literal["nothing", "loading", "training", "saving", "ended"]
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_EXIT_CODE = Interrupted.exit_code


class StopRequests:
    """Sets `requested` at the first signal while training or saving, and says what a second one would cost: that raises
    KeyboardInterrupt, wherever the run is. While loading, where nothing can be lost, the first one does.

    Signals are caught from enter to exit; with `to_the_end`, an exit by an error leaves them ignored: the process is about to
    say how it ended, and to end.
    """

    def __init__(self, announce: Callable[[str], None], *, to_the_end: bool = False) -> None:
        self.requested = False
        self.may_abandon: Callable[[], bool] = lambda: True  # whether the step under way can be given up
        self.at_stake: Callable[[], str] = lambda: "this run"  # what giving up would lose
        self._announce, self._to_the_end = announce, to_the_end
        self._doing: Doing = "nothing"
        self._before: dict[int, Any] = {}
        self._insisted = 0  # how often, once all was over

    def __enter__(self) -> StopRequests:
        for number in _SIGNALS:
            # nohup ignores hang-ups for us
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        ignored = kind is not None and self._to_the_end  # by the system: Python takes its own handlers away as it ends
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if ignored else handler)

    @contextmanager
    def during(self, doing: Doing) -> Iterator[None]:
        """Gives signals the meaning that they have while `doing`. May be nested."""
        doing_before, self._doing = self._doing, doing
        try:
            yield
        finally:
            if self._doing != "ended":
                self._doing = doing_before

    def end(self) -> None:
        """Ignores signals from now on, as all that can be saved is; insisting ends a wait for a drive that may never answer."""
        self._doing = "ended"

    def _insist(self, number: int) -> None:
        if number == signal.SIGHUP:
            return
        self._insisted += 1
        if self._insisted > 1:
            os._exit(_EXIT_CODE)
        self._say("waiting for the drives; a second Ctrl-C ends the process at once (committed state is safe)")

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self._doing == "ended":
            self._insist(number)
            return
        if self._doing in ("nothing", "loading"):
            raise KeyboardInterrupt
        if self.requested:
            if number == signal.SIGHUP:  # nobody sends it twice on purpose: a terminal that closes may
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
        with suppress(RuntimeError):  # this signal came inside the writing of another line, which Python cannot write in
            self._announce(text)
