"""What Ctrl-C and SIGTERM mean, by what the run is doing: nothing that is saved, or about to be, is lost by pressing once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

Doing = Literal["nothing", "loading", "training", "saving"]


class StopRequests:
    """`requested` is set by the first signal while training; the run looks at it between micro-batches. A second one, or
    one while loading, where nothing can be lost, raises KeyboardInterrupt. While saving it takes two."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.requested = False
        self._announce = announce
        self._doing: Doing = "nothing"
        self._while_saving = 0

    @contextmanager
    def during(self, doing: Doing) -> Iterator[None]:
        """Inside, signals mean what they mean while `doing`. May be nested."""
        doing_before, self._doing = self._doing, doing
        self._while_saving = 0
        before = {number: signal.signal(number, self._request) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._doing = doing_before

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self._doing == "saving":
            self._while_saving += 1
            if self._while_saving > 1:
                raise KeyboardInterrupt
            self._announce("saving the state; interrupting once more gives it up")
            return
        if self._doing == "loading" or self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._announce(
            "stopping at the next micro-batch, or after this step if its updates have begun;\n"
            "the state is saved then. Interrupting once more stops at once"
        )
