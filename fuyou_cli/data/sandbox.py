"""Limits foreign code: chat templates are programs, and tokenizers may raise anything. Used in the worker, but for `own_class`.

While a template renders, the kernel bounds its memory: a larger request is a MemoryError. Its time is counted in processor
seconds, so that a busy machine changes nothing. Too much time ends the process, because nothing else can interrupt a call into
C that never returns. The parent process then reads from a file what the worker was doing.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from fuyou_cli.core.errors import NO_THREADS, FuyouError
from fuyou_cli.core.json_files import read_object, shown

from .formats import RowError

TEMPLATE_SECONDS = 20.0  # of the processor, for one conversation; most take milliseconds
TEMPLATE_BYTES = 512 << 20  # beyond what the process already has
_LARGEST_SETTINGS = 64 << 20  # bytes of tokenizer_config.json
OVERDUE = signal.SIGPROF  # ends a process that takes longer
_LONGEST = 300
_SPEAKS = ("Exception", "OSError", "ValueError", "TemplateError", "TemplateSyntaxError", "UndefinedError")
_PASSED_ON = (FuyouError, RowError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit)


def own_class(tokenizer_dir: Path) -> str:
    """Names the class that a tokenizer has in code of its own. Empty if there is none. That code is never run: neither a limit
    nor another process keeps it from what the user may do."""
    file = tokenizer_dir / "tokenizer_config.json"
    named = read_object(file, limit=_LARGEST_SETTINGS, finite=False).get("auto_map") if file.is_file() else None
    if isinstance(named, dict):
        named = named.get("AutoTokenizer")
    classes = named if isinstance(named, list) else [named]  # slow and fast
    return ", ".join(shown(one)[1:-1] for one in classes if isinstance(one, str))


def reason(error: BaseException) -> str:
    """Returns an error as one short line, with its kind where that says more than the text."""
    kind = type(error).__name__
    words = (str(error).strip().splitlines() or [""])[0][:_LONGEST]
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return words if words and kind in _SPEAKS else f"{kind}: {words}" if words else kind


class LibraryErrors:
    """Raises `as_error(reason)` instead of whatever a library raises inside `with LibraryErrors(as_error):`.

    Our own errors and MemoryError pass through. A panic of the Rust code below a tokenizer is no Exception, but is caught too.
    """

    def __init__(self, as_error: Callable[[str], Exception]) -> None:
        self._as_error = as_error

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and not isinstance(error, _PASSED_ON):
            why = reason(error)
            if os.strerror(errno.EAGAIN) in why:  # a tokenizer starts threads
                raise FuyouError(f"cannot start another thread or process: {why}", hint=NO_THREADS) from error
            raise self._as_error(why) from error


@contextmanager
def time_limit(what: str, at: Path, seconds: float) -> Iterator[None]:
    """Ends the process after this many seconds of processor time inside. The file `at` then says `what` it was doing."""
    at.write_bytes(os.fsencode(what))
    signal.signal(OVERDUE, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@contextmanager
def memory_limit() -> Iterator[None]:
    """Lets the process allocate at most TEMPLATE_BYTES more inside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])  # counts against the limit, with stacks
    known = [pages * resource.getpagesize() + TEMPLATE_BYTES]
    known += [value for value in (soft, hard) if value != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(known), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
