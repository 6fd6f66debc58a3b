"""Where output goes: results on stdout, everything else on stderr.

Plain lines are written here without Rich, whose import costs 40 ms; tables and progress ask for a Rich console.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_PLAIN_WIDTH = 100  # columns when the output is not a terminal


def write_result(text: str) -> None:
    """A line on stdout: what the command was asked for."""
    print(text, file=sys.stdout)


def write_status(text: str) -> None:
    """A line on stderr: everything a person may want to know besides."""
    print(text, file=sys.stderr)


def write_json(payload: dict[str, Any]) -> None:
    """The result for a machine, with the version of its layout first."""
    write_result(json.dumps({"schema_version": 1, **payload}, indent=2))


def result_console() -> Console:
    """A Rich console on stdout. NO_COLOR is obeyed by Rich itself; symbols by `render.theme.symbols`."""
    return _console(sys.stdout)


def status_console() -> Console:
    """A Rich console on stderr."""
    return _console(sys.stderr)


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False, width=None if stream.isatty() else _PLAIN_WIDTH)


def prepare_streams() -> None:
    """Characters a terminal cannot encode become question marks instead of an exception."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # a test's replacement may have none
        if reconfigure is not None:
            reconfigure(errors="replace")


def styled(text: str, code: str, stream: TextIO) -> str:
    """`text` with an ANSI style where `stream` is a terminal that wants colour."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty():
        return text
    return f"\033[{code}m{text}\033[0m"


def confirm(question: str) -> bool | None:
    """The answer of the person at the terminal; None where there is none to ask."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
