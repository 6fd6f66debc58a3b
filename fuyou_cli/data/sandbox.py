"""Keeps code of others within bounds: chat templates are programs, and tokenizers raise anything. In the worker only.

Memory is bounded by the kernel while a template renders: what it asks for beyond that is a MemoryError. Time is the
processor's, so that a busy machine changes nothing, and ends the process: a call into C that never returns cannot be
interrupted otherwise. Whoever started the process then reads from a file what it was at.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from fuyou_cli.core.errors import FuyouError

from .formats import RowError

TEMPLATE_SECONDS = 20.0  # of the processor, for one conversation: usual ones take milliseconds
TEMPLATE_BYTES = 512 << 20  # beside what the process has
OVERDUE = signal.SIGPROF  # ends a process that took longer
_LONGEST = 300
_SPEAKS = ("Exception", "OSError", "ValueError", "TemplateError", "TemplateSyntaxError", "UndefinedError")
_PASSED_ON = (FuyouError, RowError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit)


def reason(error: BaseException) -> str:
    """Tells an error in one short line, with its kind where that says more than the words."""
    kind = type(error).__name__
    words = (str(error).strip().splitlines() or [""])[0][:_LONGEST]
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return words if words and kind in _SPEAKS else f"{kind}: {words}" if words else kind


class LibraryErrors:
    """Raises `as_error(reason)` in place of whatever a library raises inside `with LibraryErrors(as_error):`.

    Errors that are told already pass, and so does a lack of memory. A panic of the Rust below a tokenizer is no Exception,
    but told as well."""

    def __init__(self, as_error: Callable[[str], Exception]) -> None:
        self._as_error = as_error

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and not isinstance(error, _PASSED_ON):
            raise self._as_error(reason(error)) from error


@contextmanager
def time_limit(what: str, at: Path, seconds: float) -> Iterator[None]:
    """Ends the process after so many seconds of processor time inside; the file `at` then says `what` it was at."""
    at.write_bytes(os.fsencode(what))
    signal.signal(OVERDUE, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@contextmanager
def memory_limit() -> Iterator[None]:
    """Lets the process get at most TEMPLATE_BYTES more inside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])  # what counts against it, stacks included
    known = [pages * resource.getpagesize() + TEMPLATE_BYTES]
    known += [value for value in (soft, hard) if value != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(known), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
