"""Makes SIGTERM, SIGUSR1 and a closed terminal end a command like Ctrl-C: with a message, without leaving processes or scratch
files. Slurm sends SIGUSR1 (`--signal`) before a job's time is over."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_LIKE_CTRL_C = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def like_ctrl_c() -> Iterator[None]:
    """Raises KeyboardInterrupt on these signals inside the context, unless they are handled or ignored already (nohup
    ignores)."""
    before = {number: signal.getsignal(number) for number in _LIKE_CTRL_C}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is _interrupt:
                signal.signal(number, handler)
