"""Rows of JSON: one object per line, or a file that is one array, read object by object."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import parsed

LARGEST_ROW = 1 << 24  # characters: what is held of a file at most
Placed = tuple[str, dict[str, Any]]  # "train.jsonl:17" and the row
_CHUNK = 1 << 18
_SPACE = re.compile(r"[ \t\r\n]*")
_POSITION = re.compile(r": line \d+ column (\d+) \(char \d+\)$")
_TORN = 16  # characters: what the end of the buffer may tear apart, such as a word or an escape
_ENDS = json.JSONDecoder(parse_int=str, parse_float=str)  # finds where an element ends; numbers of any length are refused later


def json_rows(file: Path) -> Iterator[Placed]:
    """Yields the rows of a file of one object per line, or of one array. Raises UsageError with file and line."""
    with file.open("rb") as stream:
        head = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"["):
        with file.open(encoding="utf-8-sig", newline="") as text:
            yield from _Array(file, text.read).rows()
        return
    if file.suffix.lower() == ".json" and head.split(b"\n", 1)[0].strip() == b"{":
        raise UsageError(
            f"{file}:1: one object spread over several lines",
            hint="write one object per line (JSON lines), or an array of objects",
        )
    for number, line in enumerate(bounded_lines(file), start=1):
        if line.strip():
            yield f"{file}:{number}", json_row(line.removesuffix("\n"), f"{file}:{number}")


def bounded_lines(file: Path, *, newline: str | None = None) -> Iterator[str]:
    """Yields the lines of a text file, with or without a byte order mark. Raises UsageError for one that is no row's size."""
    with file.open(encoding="utf-8-sig", newline=newline) as stream:
        number = 1
        while line := stream.readline(LARGEST_ROW + 1):
            check_size(len(line), f"{file}:{number}")
            yield line
            number += 1


def check_size(characters: int, place: str) -> None:
    """Raises UsageError at `place` for more than a row may have."""
    if characters > LARGEST_ROW:
        hint = "cut it into several rows; a .txt file may be of any length with dataset.packing: concat"
        raise UsageError(f"{place}: a row of more than {LARGEST_ROW:,} characters", hint=hint)


def json_row(text: str, place: str) -> dict[str, Any]:
    """Reads the object that `text` is. Raises UsageError at `place`: no JSON, no object, or text that no tokenizer takes."""
    try:
        row = parsed(text, finite=False)
    except UsageError as error:
        why = _POSITION.sub(r" (column \1)", error.message)  # the line is the place's
        raise UsageError(f"{place}: {why}") from None
    if not isinstance(row, dict):
        raise UsageError(f"{place}: not a JSON object but {type(row).__name__}", hint="every row is {...}")
    return row


class _Array:
    """An array file of which no more is held than its largest element needs; `_at` is how far it is understood."""

    def __init__(self, file: Path, read: Callable[[int], str]) -> None:
        self._file, self._read = file, read
        self._text, self._at, self._ended = "", 0, False
        self._line, self._counted = 1, 0  # the line of the text's character `_counted`

    def rows(self) -> Iterator[Placed]:
        self._expect("[")
        if self._next() != "]":
            yield self._element()
            while self._next() == ",":
                self._at += 1
                yield self._element()
        self._expect("]")
        if self._next():
            raise self._error("Extra data", self._at)

    def _next(self) -> str:
        """Finds the next character that is not white space, "" at the end of the file."""
        while True:
            found = _SPACE.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def _expect(self, character: str) -> None:
        if self._next() != character:
            raise self._error(f"Expecting '{character}'" + " or ','" * (character == "]"), self._at)
        self._at += 1

    def _element(self) -> Placed:
        self._next()
        while True:
            self._line, self._counted = self._line_of(self._at), self._at
            place = f"{self._file}:{self._line}"
            try:
                _, end = _ENDS.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                torn = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _TORN
                if not (torn and self._more()):
                    raise self._error(error.msg, error.pos) from None
            except RecursionError:
                raise UsageError(f"{place}: not valid JSON: nested too deeply") from None
            else:
                text, self._at = self._text[self._at : end], end
                return place, json_row(text, place)

    def _more(self) -> bool:
        """Reads as much again as is left, so that a large element is not decoded from its beginning too often."""
        left = len(self._text) - self._at
        check_size(left, f"{self._file}:{self._line_of(self._at)}")
        chunk = "" if self._ended else self._read(max(_CHUNK, left))
        self._ended = not chunk
        if chunk:
            self._line = self._line_of(self._at)
            self._text, self._at, self._counted = self._text[self._at :] + chunk, 0, 0
        return bool(chunk)

    def _line_of(self, at: int) -> int:
        return self._line + self._text.count("\n", self._counted, at)

    def _error(self, what: str, at: int) -> UsageError:
        column = at - self._text.rfind("\n", 0, at)
        return UsageError(f"{self._file}:{self._line_of(at)}: not valid JSON: {what} (column {column})")
