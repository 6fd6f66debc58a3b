"""Delays signals while something is opened, so that everything that was opened is also closed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays SIGINT, SIGTERM, SIGHUP and SIGUSR1 to the end of the context.

    An exception from a handler can come between an opening call and the line that keeps its result: then nobody closes it.
    Python runs handlers on the main thread only, so other threads need no delay.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived, before = list[int](), dict[int, Any]()
    try:
        for number in _SIGNALS:
            before[number] = signal.getsignal(number)
            signal.signal(number, lambda number, frame: arrived.append(number))
        yield
    finally:
        for changed, handler in before.items():
            signal.signal(changed, handler)
        for late in arrived:
            signal.raise_signal(late)
