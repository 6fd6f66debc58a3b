"""Shows what a model wrote after a prompt, in few lines."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from fuyou_cli.core.printable import one_line, printable
from fuyou_cli.training.report import SampleReport

_LINES = 3  # of a text at most; the log has all of it
_INDENT = "    "


def sample_lines(report: SampleReport, console: Console, width: int) -> list[str]:
    """Returns a line with step and prompt, and a few with what followed, each of at most `width` columns."""
    head = Text(f"sample at step {report.step}  {one_line(report.prompt)}")
    head.truncate(width, overflow="crop")
    found = _wrapped(report.text.strip("\n"), console, width - len(_INDENT) - len(" ..."))
    goes_on = report.ended == "length" or len(found) > _LINES
    shown = found[:_LINES] or ["(nothing)"]
    return [head.plain, *(_INDENT + line for line in shown[:-1]), _INDENT + shown[-1] + " ..." * goes_on]


def _wrapped(text: str, console: Console, width: int) -> list[str]:
    lines = (Text(line).wrap(console, max(width, 8), overflow="fold") for line in printable(text).split("\n"))
    found = [part.plain.rstrip() for parts in lines for part in parts]
    return found if any(found) else []
