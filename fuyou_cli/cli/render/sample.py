"""One decoded sample with its loss mask, readable without colour.

A terminal underlines what is trained on. Anywhere else a line of marks runs under it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from .theme import Symbols, heading, say, show, symbols

MAX_LINES = 24  # of the sample; the middle of a longer one is left out

_Letter = tuple[str, bool]


def show_sample(console: Console, pieces: Sequence[tuple[str, bool]]) -> None:
    """Print (text, in_loss) in order, the middle of a long sample left out."""
    shapes = symbols(console)
    styled = console.is_terminal and not console.is_dumb_terminal
    lines = _lines(pieces, console.width - 4, console.encoding, shapes)
    trained = sum(len(text) for text, in_loss in pieces if in_loss)
    heading(console, "One sample", f"{trained:,} of {sum(len(text) for text, _ in pieces):,} characters are trained on")
    half, left_out = MAX_LINES // 2, len(lines) - MAX_LINES
    for line in lines[:half] if left_out > 0 else lines:
        _show_line(console, line, shapes, styled)
    if left_out > 0:
        say(console, f"... {left_out:,} lines left out ...", style="dim", indent=4)
        for line in lines[-half:]:
            _show_line(console, line, shapes, styled)
    say(console, _legend(shapes, styled), indent=2)


def _legend(shapes: Symbols, styled: bool) -> Text:
    if styled:
        return Text.assemble(("underlined", "bold underline"), ": trained on; ", ("the rest", "dim"), ": context only")
    return Text(f"{shapes.mark * 3} under text: trained on; the rest is context only")


def _show_line(console: Console, line: Sequence[_Letter], shapes: Symbols, styled: bool) -> None:
    text = Text(no_wrap=True, overflow="crop")
    for in_loss, run in groupby(line, key=lambda letter: letter[1]):
        text.append("".join(letter for letter, _ in run), style=("bold underline" if in_loss else "dim") if styled else "")
    show(console, text, indent=4)
    if not styled and any(in_loss for _, in_loss in line):
        marks = "".join((shapes.mark if in_loss else " ") * cell_len(letter) for letter, in_loss in line)
        show(console, Text(marks, no_wrap=True, overflow="crop"), indent=4)


def _lines(pieces: Sequence[tuple[str, bool]], width: int, encoding: str, shapes: Symbols) -> list[list[_Letter]]:
    """Cut the sample into lines of at most `width` cells, at its own line ends and, where it can, between words."""
    lines: list[list[_Letter]] = [[]]
    for text, in_loss in pieces:
        for letter in text:
            if letter == "\n":
                if in_loss:  # a trained line end is invisible otherwise
                    lines[-1].append((shapes.newline, True))
                lines.append([])
            else:
                lines[-1].append((_visible(letter, encoding), in_loss))
    return [part for line in lines for part in _wrapped(line, max(width - len(shapes.newline), 8))]


def _visible(letter: str, encoding: str) -> str:
    """Return a printable form: a sample must not be able to steer the terminal."""
    if letter == "\t":
        return "    "
    if not letter.isprintable():
        return letter.encode("unicode_escape").decode("ascii")
    return letter.encode(encoding, "replace").decode(encoding)


def _wrapped(line: list[_Letter], width: int) -> list[list[_Letter]]:
    parts: list[list[_Letter]] = []
    while True:
        used, end = 0, 0
        while end < len(line) and used + cell_len(line[end][0]) <= width:
            used += cell_len(line[end][0])
            end += 1
        if end == len(line):
            return [*parts, line]
        space = next((cut for cut in range(end, max(end - 24, 0), -1) if line[cut - 1][0] == " "), end)
        parts.append(line[: max(space, 1)])
        line = line[max(space, 1) :]
