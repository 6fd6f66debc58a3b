"""Rows of JSON: one object's text, or a file that is one array, read object by object. Standard library only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.json_files import is_deeper, once

LARGEST_ROW = 1 << 24  # characters of a line, or of an object in an array: what is held of a file at most
_CHUNK = 1 << 18
_SPACE = re.compile(r"[ \t\r\n]*")
_SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)
_TORN = 16  # characters: what the end of the buffer may tear apart, such as a word or an escape
_DECODER = json.JSONDecoder(object_pairs_hook=once)


def json_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and object of every line that is not blank. Memory: the largest line, at most `LARGEST_ROW`."""
    number = 0
    try:
        with file.open(encoding="utf-8-sig") as lines:  # with or without a byte order mark
            while line := lines.readline(LARGEST_ROW + 1):
                number += 1
                place = f"{file}:{number}"
                if len(line) > LARGEST_ROW:
                    hint = "cut it into several rows; a .txt file may be of any length with dataset.packing: concat"
                    raise UsageError(f"{place}: a row of more than {LARGEST_ROW:,} characters", hint=hint)
                if line.strip():
                    yield place, json_object(line.removesuffix("\n"), place)
    except UnicodeDecodeError as error:
        raise UsageError(f"{first_bad_line(file)}: not UTF-8 text: {error.reason}") from error


def json_object(text: str, place: str) -> dict[str, Any]:
    """The object that `text` is. Raises UsageError at `place`: no JSON, no object, or text that no tokenizer takes."""
    try:
        return _checked(_DECODER.decode(text), text, place)
    except json.JSONDecodeError as error:
        raise UsageError(f"{place}: not valid JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise _unusable(error, place) from None


def _checked(value: object, text: str, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{place}: not a JSON object but {type(value).__name__}", hint="every row is {...}")
    if is_deeper(value):  # templates and what counts its characters walk it recursively
        raise UsageError(f"{place}: not usable JSON: nested too deeply")
    if _SURROGATE.search(text):  # rare, and whole pairs are fine: only then the row is encoded to see
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise UsageError(
                f"{place}: {half} is half of a character (a lone surrogate): this text cannot be tokenised",
                hint="write the character whole, or leave the row out",
            ) from None
    return value


def _unusable(error: Exception, place: str) -> UsageError:
    if isinstance(error, RecursionError):
        return UsageError(f"{place}: not usable JSON: nested too deeply")
    return UsageError(f"{place}: not usable JSON: {str(error).partition(';')[0]}")  # a number of thousands of digits


def json_array(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place ("rows.json:17") and object of every element. Memory: the largest element, at most `LARGEST_ROW`."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            yield from _Array(file, stream.read).elements()
    except UnicodeDecodeError as error:
        raise UsageError(f"{first_bad_line(file)}: not UTF-8 text: {error.reason}") from error


class _Array:
    """What has been read of the file and not yet been given out; `_at` is how far it is understood."""

    def __init__(self, file: Path, read: Any) -> None:
        self._file, self._read = file, read
        self._text, self._at, self._ended = "", 0, False
        self._line, self._counted = 1, 0  # the line of the text's character `_counted`

    def elements(self) -> Iterator[tuple[str, dict[str, Any]]]:
        self._expect("[")
        if self._next() == "]":
            self._at += 1
        else:
            more = True
            while more:
                yield self._element()
                more = self._next() == ","
                self._expect("," if more else "]")
        if self._next():
            raise self._error("Extra data", self._at)

    def _next(self) -> str:
        """The next character that is not white space, "" at the end of the file."""
        while True:
            found = _SPACE.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def _expect(self, character: str) -> None:
        if self._next() != character:
            raise self._error(f"Expecting '{character}'" + " or ','" * (character == "]"), self._at)
        self._at += 1

    def _element(self) -> tuple[str, dict[str, Any]]:
        self._next()
        while True:
            self._line, self._counted = self._line_of(self._at), self._at
            place = f"{self._file}:{self._line}"
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if not (self._torn(error) and self._more()):
                    raise self._error(error.msg, error.pos) from None
            except (ValueError, RecursionError) as error:
                raise _unusable(error, place) from None
            else:
                checked = _checked(value, self._text[self._at : end], place)
                self._at = end
                return place, checked

    def _torn(self, error: json.JSONDecodeError) -> bool:
        """Whether the text ends too early, as far as one can tell, rather than being wrong."""
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _TORN

    def _more(self) -> bool:
        """Reads as much again as is left, so that a large element is not decoded from its beginning too often."""
        left = len(self._text) - self._at
        if left > LARGEST_ROW:
            raise UsageError(
                f"{self._file}:{self._line_of(self._at)}: an element of more than {LARGEST_ROW:,} characters",
                hint="cut it into several rows, or write one object per line (JSON lines)",
            )
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


def first_bad_line(file: Path) -> str:
    """file:line of the first line that is not UTF-8."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return f"{file}:{number}"
    return str(file)
