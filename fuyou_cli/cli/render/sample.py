"""Shows one decoded sample with its loss mask, readable without colour.

A terminal underlines trained text. Elsewhere a line of marks runs under it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from fuyou_cli.core.printable import printable

from .theme import encodable, heading, say, show, symbols

MAX_LINES = 24  # of the sample; a longer one loses its middle
_TRAINED = "bold underline"


def show_sample(console: Console, pieces: Sequence[tuple[str, bool]]) -> None:
    """Prints (text, in_loss) pieces in order, without the middle of a long sample."""
    trained = sum(len(text) for text, in_loss in pieces if in_loss)
    heading(console, "One sample", f"{trained:,} of {sum(len(text) for text, _ in pieces):,} characters are trained")
    show_pieces(console, pieces)
    show_key(console)


def show_pieces(console: Console, pieces: Sequence[tuple[str, bool]]) -> None:
    """Prints the pieces alone."""
    shapes, styled = symbols(console), _is_styled(console)
    whole = Text()
    for text, in_loss in pieces:
        plain = encodable(printable(text.replace("\t", "    ")), console)
        if in_loss:  # otherwise a trained line end is invisible
            plain = plain.replace("\n", f"{shapes.newline}\n")
        whole.append(plain, style=_TRAINED if in_loss else "dim")
    lines = list(whole.wrap(console, max(console.width - 6, 8), overflow="fold"))
    half, left_out = MAX_LINES // 2, len(lines) - MAX_LINES
    for number, line in enumerate(lines):
        if left_out > 0 and half <= number < len(lines) - half:
            if number == half:
                say(console, f"... {left_out:,} lines left out ...", style="dim", indent=4)
            continue
        show(console, line, indent=4)
        if not styled and (marks := _marks(line, shapes.mark)):
            show(console, Text(marks), indent=4)


def show_key(console: Console) -> None:
    """Says how trained text is shown."""
    mark = symbols(console).mark * 3
    under = ("underlined", "bold underline") if _is_styled(console) else f"{mark} under text"
    say(console, Text.assemble(under, ": trained; the rest is context only"), indent=2)


def _is_styled(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


def _marks(line: Text, mark: str) -> str:
    """Draws a mark under every trained cell; returns nothing if no cell is trained."""
    marks = ""
    for span in sorted(line.spans):
        if span.style == _TRAINED:
            marks = marks.ljust(cell_len(line.plain[: span.start])) + mark * cell_len(line.plain[span.start : span.end])
    return marks
