"""Spares Python's cycle collector work that makes many objects and few cycles."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
