"""Bounds on chat templates, which are programs of others: one may loop without end or make text without end. Worker only.

Memory is bounded by the kernel while a template renders: what it asks for beyond that is a MemoryError. Time is the
processor's, so that a busy machine changes nothing, and ends the process: a call into C that never returns cannot be
interrupted otherwise. Whoever started the process then reads from a file what it was at.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPLATE_SECONDS = 20.0  # of the processor, for one conversation: usual ones take milliseconds
TEMPLATE_BYTES = 512 << 20  # beside what the process has
OVERDUE = signal.SIGPROF  # ends a process that took longer


class Watch:
    """`with watch(what):` is over within `seconds` of processor time, or the process is; `said(at)` is then `what`."""

    def __init__(self, at: Path, seconds: float) -> None:
        self._file, self._seconds = os.open(at, os.O_WRONLY | os.O_CREAT, 0o600), seconds
        signal.signal(OVERDUE, signal.SIG_DFL)

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        os.pwrite(self._file, os.fsencode(what) + b"\0", 0)
        signal.setitimer(signal.ITIMER_PROF, self._seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def said(at: Path) -> str:
    return os.fsdecode(at.read_bytes().partition(b"\0")[0])


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Inside, the process gets at most TEMPLATE_BYTES more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    known = [_data_bytes() + TEMPLATE_BYTES, *(value for value in (soft, hard) if value != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(known), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int:
    """What the kernel counts against RLIMIT_DATA now, stacks included."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    return pages * resource.getpagesize()
