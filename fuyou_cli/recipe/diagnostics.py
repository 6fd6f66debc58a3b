"""Shows what is wrong with a recipe like a compiler: place, source line, caret, and what to write instead."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import one_line, show_path

Keys = tuple[str | int, ...]  # of keys, and positions in lists

COMMAND_LINE = "<command line>"
SHOWN_AT_MOST = 40  # most diagnostics shown; a file of another program would produce pages of them
_WIDTH = 96  # columns of a source line
_SHOWN = 60  # characters of a value
_LEAD = 32  # columns kept left of the caret when a long line is cut


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPlace:
    """Marks columns [column, end) of one line of a file, all counted from 0; of an override if `file` is COMMAND_LINE."""

    file: str
    line: int = 0
    column: int = 0
    end: int = 0
    source: str | None = None  # None: the place is the whole file


NOWHERE = TextPlace(file="")


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnostic:
    """Says what is wrong with the key at `path`, or with the whole recipe if `path` is empty. The loader adds the place."""

    code: str
    message: str
    help: str | None = None
    path: Keys = ()
    at_key: bool = False  # point at the key, not at its value
    place: TextPlace = NOWHERE

    def as_dict(self) -> dict[str, object]:
        """Returns it for --json. Lines and columns count from 1; null if there are none."""
        located = self.place.source is not None and self.place.file != COMMAND_LINE
        return {
            "file": self.place.file,
            "line": self.place.line + 1 if located else None,
            "column": self.place.column + 1 if located else None,
            "code": self.code,
            "key": show_path(self.path) or None,
            "message": self.message,
            "help": self.help,
        }


class RecipeErrors(UsageError):
    """Reports everything that is wrong with a recipe, at once."""

    def __init__(self, diagnostics: Sequence[Diagnostic], *, name: str) -> None:
        self.diagnostics, self.name = tuple(diagnostics), name
        super().__init__(render(self.diagnostics, name=name))


def render(diagnostics: Sequence[Diagnostic], *, name: str) -> str:
    shown = [_render_one(diagnostic) for diagnostic in diagnostics[:SHOWN_AT_MOST]]
    hidden = len(diagnostics) - len(shown)
    count = "1 error" if len(diagnostics) == 1 else f"{len(diagnostics)} errors"
    more = f" ({hidden} more not shown)" if hidden else ""
    return "\n".join([*shown, "", f"Found {count} in {one_line(name)}{more}. Nothing was run."])


def _render_one(diagnostic: Diagnostic) -> str:
    place = diagnostic.place
    text = f"error[{diagnostic.code}]: {one_line(diagnostic.message)}"
    file = one_line(place.file)
    if place.source is None:
        lines = [f"{file}: {text}"]
    elif place.file == COMMAND_LINE:
        lines = [f"{file}: {text}", f"    {_crop(one_line(place.source), 0)[0]}"]
    else:
        lines = [f"{file}:{place.line + 1}:{place.column + 1}: {text}", *_snippet(place, place.source)]
    if diagnostic.help:
        lines.append(f"  help: {one_line(diagnostic.help)}")
    return "\n".join(lines)


def _snippet(place: TextPlace, source: str) -> list[str]:
    number = str(place.line + 1)
    source = source.replace("\t", " ")
    column, end = (len(one_line(source[:at])) for at in (place.column, max(place.end, place.column + 1)))
    shown, cut = _crop(one_line(source), column)
    before, marked = shown[: column - cut], shown[column - cut : end - cut]
    carets = "^" * max(1, _columns(marked))
    gutter = " " * len(number)
    return [f" {gutter} |", f" {number} | {shown}".rstrip(), f" {gutter} | {' ' * _columns(before)}{carets}"]


def _crop(text: str, column: int) -> tuple[str, int]:
    """Cuts a window that contains `column` from a long line. Returns it with the number of characters cut on its left."""
    cut = max(0, column - _LEAD) if len(text) > _WIDTH else 0
    return text[cut : cut + _WIDTH], cut


def _columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def spelt(value: Any) -> str:
    """Shows a value as a recipe has it, on one short line."""
    text = one_line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
