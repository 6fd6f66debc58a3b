"""Writes results to stdout and everything else to stderr.

Plain lines are written without Rich, whose import takes 40 ms; tables and progress ask for a Rich console. Control characters
in outside text are spelt out (`core/json_files`), so that the text cannot control the terminal; so is what libraries print and
log by themselves. A stderr that cannot be written to is ignored: a closed pipe or a lost terminal must not end a long run.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

from fuyou_cli.core.errors import FuyouError, UsageError
from fuyou_cli.core.json_files import one_line, printable

if TYPE_CHECKING:
    from rich.console import Console

_PLAIN_WIDTH = 100  # columns when the output is not a terminal
_OF_BARS = re.compile(r"(?:\r|\n|\x1b\[A)*")  # what tqdm moves the cursor with between its bars
STDOUT = "standard output"  # as errors name it


def write_result(text: str) -> None:
    """Writes a line of the result to stdout."""
    print(one_line(text), file=sys.stdout)


def write_document(text: str) -> None:
    """Writes several lines to stdout: a recipe, or JSON."""
    print(printable(text), file=sys.stdout)


def write_last_result(text: str) -> None:
    """Writes a line to stdout at the end of finished work; to stderr where stdout cannot be written to (closed, full)."""
    try:
        print(one_line(text), file=sys.stdout, flush=True)
    except OSError:
        _send_nowhere(sys.stdout)
        write_status(text)


def write_status(text: str, *, lead: str = "") -> None:
    """Writes a line to stderr, wrapped on a terminal, after a `lead` that may be `styled`. Text of several lines is a
    drawing and stays unchanged."""
    text = lead + printable(text)
    try:
        stream = _own(sys.stderr)
        wide = stream.isatty() and "\n" not in text
        print(_wrapped(text, _width(stream)) if wide else text, file=stream, flush=True)
    except OSError:
        _send_nowhere(sys.stderr)


def _wrapped(text: str, width: int) -> str:
    """Wraps text and indents continued lines by two more. A word longer than a line (a path) is left to the terminal."""
    indent = text[: len(text) - len(text.lstrip())]
    return textwrap.fill(text, max(width, 20), subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False)


def _width(stream: TextIO) -> int:
    """Returns COLUMNS if set, else the terminal's width, else a page's."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit() and int(columns) > 0:
        return int(columns)
    if not stream.isatty():
        return _PLAIN_WIDTH
    try:
        return os.get_terminal_size(stream.fileno()).columns or _PLAIN_WIDTH
    except OSError:
        return _PLAIN_WIDTH


def write_json(payload: dict[str, Any]) -> None:
    """Writes the result as JSON, with the version of its layout first."""
    write_document(json.dumps({"schema_version": 1, **payload}, indent=2))


def result_console() -> Console:
    """Makes a Rich console on stdout. Rich itself obeys NO_COLOR."""
    return _console(_own(sys.stdout))


def status_console() -> Console:
    """Makes a Rich console on stderr."""
    return _console(cast(TextIO, _Lasting(_own(sys.stderr))))


def _console(stream: TextIO) -> Console:
    from .render.theme import SafeConsole

    width = None if stream.isatty() else _width(stream)  # a terminal's width may change, and Rich follows it and COLUMNS
    return SafeConsole(file=stream, highlight=False, markup=False, width=width)


class _Lasting:
    """Drops everything after the first failed write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            _send_nowhere(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            _send_nowhere(self._stream)


@contextmanager
def _naming_stdout() -> Iterator[None]:
    """Names what an error of a write to stdout is about: a full disk there is no full disk of a run."""
    try:
        yield
    except OSError as error:
        error.filename = STDOUT
        raise


class _Library(_Lasting):
    """Is sys.stdout or sys.stderr for everybody else: text that could control the terminal is spelt. `lasts`: as `_Lasting`."""

    def __init__(self, stream: TextIO, *, lasts: bool) -> None:
        super().__init__(stream)
        self.own, self._lasts = stream, lasts

    def write(self, text: str) -> int:
        if not _OF_BARS.fullmatch(text):
            begin = "\r" * text.startswith("\r")  # a bar is drawn again
            written = begin + "\t".join(map(printable, text.removeprefix(begin).split("\t")))
        else:
            written = text
        if self._lasts:
            super().write(written)
        else:
            with _naming_stdout():
                self.own.write(written)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if self._lasts:
            super().flush()
        else:
            with _naming_stdout():
                self.own.flush()


def _own(stream: TextIO) -> TextIO:
    """Returns the stream for text that is safe already, and may be styled."""
    return stream.own if isinstance(stream, _Library) else stream


def _send_nowhere(stream: TextIO) -> None:
    """Drops further output and the stream's buffer, which Python would otherwise fail to write at exit."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()
    except (OSError, ValueError):
        pass


_closed: set[str] = set()  # standard streams that were closed when the process began


def prepare_streams() -> None:
    """Makes streams print a question mark for characters that the terminal cannot encode, instead of failing, and spell what
    libraries print by themselves. Opens those that are closed (`>&-`)."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        _open_if_closed(number, name)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # a stream that replaces it in a test may not have one
        if reconfigure is not None:
            reconfigure(errors="replace")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Library):
            setattr(sys, name, _Library(stream, lasts=name == "stderr"))


def _open_if_closed(number: int, name: str) -> None:
    """Gives a closed stream a file. Otherwise the next file that is opened, a store's say, would have its number, and get all
    that a library prints. stdout gets one that cannot be written, because a result that nobody gets is an error."""
    try:
        os.fstat(number)
    except OSError:
        _closed.add(name)
        os.set_inheritable(os.open(os.devnull, os.O_RDONLY if name == "stdout" else os.O_RDWR), True)  # has the lowest number
    if getattr(sys, name) is None:
        setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115


def drop_result() -> None:
    """Drops what stdout did not take. Python would try to write it again at exit, and end with a code of its own."""
    _send_nowhere(sys.stdout)


def lost_result(error: OSError) -> FuyouError | None:
    """Returns the error for a result that was written to a closed stdout, if that is what `error` is."""
    if error.errno != errno.EBADF or "stdout" not in _closed:
        return None
    _send_nowhere(sys.stdout)
    return FuyouError("standard output is closed, so the result is lost", hint="leave out >&-, or write to a file: > FILE")


def tell_errors() -> None:
    """Makes errors go to stdout where stderr is closed, so that they are seen. The command is over."""
    if "stderr" in _closed and "stdout" not in _closed:
        sys.stderr = sys.stdout


def styled(text: str, code: str, stream: TextIO) -> str:
    """Returns `text` with an ANSI style if `stream` is a terminal that accepts colour."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty():
        return text
    return f"\033[{code}m{text}\033[0m"


def asked(question: str, *, otherwise: str) -> str:
    """Asks the user at the terminal for a line. An empty answer means `otherwise`. Raises UsageError if there is no
    terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("there is no terminal for questions", hint="give the answers as options: see --help")
    print(f"{one_line(question)}{f' [{otherwise}]' if otherwise else ''}: ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise UsageError("the terminal was closed before it answered")
    return line.strip() or otherwise


def agreed(question: str, *, yes: bool, otherwise: str) -> bool:
    """Asks the user at the terminal, unless `yes` is given. `otherwise` is what "no" leads to. Raises UsageError if nobody
    can be asked."""
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"{otherwise}: there is no terminal for the question", hint="add --yes")
    print(f"{one_line(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    write_status(otherwise)
    return False
