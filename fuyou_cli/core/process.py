"""Changes the whole process for a while: signals wait while something is opened, so that all of it is also closed, and Python's
cycle collector is spared work that makes many objects and few cycles."""

from __future__ import annotations

import atexit
import gc
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


@contextmanager
def uncollected() -> Iterator[None]:
    """Turns the cycle collector off: it takes much of a plan's time and frees nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # else somebody wants it to stay as it is
                gc.freeze()  # and back: all there is counts as old, or the next new object would have all of it looked at
                gc.unfreeze()
            gc.enable()


def uncollected_at_exit() -> None:
    """Spares a process that is about to end its last collection: it looks at every object, and frees what ends anyway."""
    atexit.register(gc.freeze)
