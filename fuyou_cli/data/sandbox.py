"""Limits the process that reads and tokenises: files, tokenizers and chat templates are of strangers, templates are programs.

One limit holds for all of them. The kernel bounds the memory of the process: a larger request is a MemoryError, or ends it.
What takes too long for one step of the work (a row, a sample, a file's beginning) ends it too, because nothing else can
interrupt a call into C that never returns; time is counted in processor seconds, so that a busy machine changes nothing. The
parent process then reads from a file what the process was doing.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from fuyou_cli.core.disk import FULL, failed_writing, remedy, unusable
from fuyou_cli.core.errors import NO_THREADS, DataSpaceError, FuyouError, UsageError
from fuyou_cli.core.json_files import read_object, shown
from fuyou_cli.core.units import GiB, gib

from .formats import RowError

SECONDS = 60.0  # of the processor, without progress; most steps take milliseconds
BYTES = 4 * GiB  # beyond what the process has as it begins: a row of 16 million characters takes half of it
_LARGEST_SETTINGS = 64 << 20  # bytes of tokenizer_config.json
OVERDUE = signal.SIGPROF  # ends a process that takes longer
_LONGEST = 300
_STACK = 16 << 20
_NOTE = 8192  # bytes of what a process is doing
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
    return ", ".join(shown(name)[1:-1] for name in classes if isinstance(name, str))


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
            refused = self._as_error(why)
            if isinstance(refused, FuyouError):  # a file's drive may be the cause
                refused = unusable(refused.message, error, hint=refused.hint)
            raise refused from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names a file of the rows in what the system says as it is written: often without a name, and of a file that is read the
    same."""
    try:
        yield
    except OSError as error:
        failed = failed_writing(path, error)
        raise (DataSpaceError(failed.message, hint=remedy(error)) if error.errno in FULL else failed) from error


class Watch:
    """Notes what this process is doing in the file `at`, which outlives it, and ends it where that takes too long."""

    def __init__(self, at: Path, seconds: float) -> None:
        self.doing, self._seconds = "", seconds
        with writing(at):
            at.write_bytes(bytes(_NOTE))
            with at.open("r+b") as file:
                self._note = mmap.mmap(file.fileno(), _NOTE)
        signal.signal(OVERDUE, signal.SIG_DFL)

    def on(self, what: str) -> None:
        """Notes progress: from now on it does `what`. Takes microseconds."""
        self.doing = what
        text = os.fsencode(what)[: _NOTE - 1] + b"\0"
        self._note[: len(text)] = text
        signal.setitimer(signal.ITIMER_PROF, self._seconds)

    def off(self) -> None:
        """Ends the watch, and lets go of the file: some file systems keep a folder as long as one in it is held."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._note.close()


@contextmanager
def watched(at: Path, seconds: float) -> Iterator[Watch]:
    """Watches what is done inside. Raises UsageError with its name where it takes too much memory."""
    watch = Watch(at, seconds)
    try:
        yield watch
    except MemoryError:
        raise UsageError(too_large(watch.doing), hint=HINT) from None
    finally:
        watch.off()


HINT = (
    "correct or remove the row, or what it is read with: the file, the tokenizer, its chat template (tokenizer.chat_template)"
)


def too_large(doing: str) -> str:
    return f"{doing} takes more than {gib(BYTES)} of memory"


def too_slow(doing: str) -> str:
    return f"{doing} takes more than {SECONDS:g} s of the processor"


def noted(at: Path) -> str:
    """Returns what a process that has ended was doing; nothing if it did not begin."""
    return os.fsdecode(at.read_bytes().partition(b"\0")[0]) if at.is_file() else ""


def limit_memory(most: int) -> None:
    """Lets this process allocate at most so many bytes more, from now on."""
    global BYTES
    BYTES = most  # as errors name it
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    stacks = _STACK * (os.cpu_count() or 1)  # of threads that libraries start later: reserved, and hardly used
    known = [_counted() + stacks + most]
    known += [value for value in (soft, hard) if value != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(known), hard))


def _counted() -> int:
    """Returns the bytes of this process that count against the limit, with stacks; without /proc what was resident at most."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()
