"""Reads small JSON files that somebody else may have written, or that a crash may have cut short: whole, or not at all.

A general parser accepts more than our files contain: duplicate keys, `NaN`, numbers of any length, very deep nesting. Here each
is an error that names the file.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from .disk import unusable
from .errors import UsageError
from .safe_files import read_plain

DEEPEST = 64  # levels of nested objects and lists
MOST_DIGITS = 300  # of one number; a whole number of this length still fits a float
MOST_VALUES = 4_000_000  # of one text; an empty list has two characters but takes seventy bytes of memory


def shown(name: str) -> str:
    """Makes a name from a file safe to print: quoted, control characters escaped, very long names cut."""
    return ascii(name) if len(name) <= 200 else ascii(name[:200]) + "..."


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object from the pairs of `object_pairs_hook`. Raises ValueError for a duplicate key."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {shown(twice)} occurs twice")
    return found


def is_deeper(value: object, depth: int = DEEPEST) -> bool:
    """Tells whether lists and objects are nested more than `depth` deep. Goes level by level, without recursion."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
    return bool(level)


def has_too_many_values(text: str) -> bool:
    """Tells whether a text may hold more than MOST_VALUES values. Commas and brackets inside strings count too."""
    return sum(map(text.count, ",[{")) > MOST_VALUES


def parsed(text: str, *, finite: bool = True, names: bool = False) -> Any:
    """Parses a text. Raises UsageError, without the file's name, for invalid JSON or for more than our files may contain.

    `finite`: infinities are refused. `names`: the text may hold file names, where Python writes bytes that are not UTF-8 as
    lone surrogates.
    """
    if has_too_many_values(text):
        raise _unreadable(f"more than {MOST_VALUES:,} values")
    try:
        value = json.loads(
            text, object_pairs_hook=once, parse_int=_whole, parse_float=_finite if finite else _number,
            parse_constant=_no_number if finite else float,
        )  # fmt: skip
        if "\\ud" in text or "\\uD" in text:  # rare; whole pairs are fine
            json.dumps(value, ensure_ascii=False).encode(errors="surrogateescape" if names else "strict")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise _unreadable(f"{half} is half of a character (a lone surrogate)") from None
    except RecursionError:
        raise _unreadable("nested too deeply") from None
    except ValueError as error:
        raise _unreadable(str(error)) from None
    if is_deeper(value):
        raise _unreadable("nested too deeply")
    return value


def _unreadable(why: str) -> UsageError:
    return UsageError(f"not valid JSON: {why[:400]}")


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number has {len(text):,} digits")
    return int(text)


def _number(text: str) -> float:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number has {len(text):,} characters")
    return float(text)


def _finite(text: str) -> float:
    value = _number(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is too large for a number")
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _refused(path: Path, what: str, hint: str | None) -> UsageError:
    return UsageError(f"{_named(path)}: {what}", hint=hint)


def _named(path: Path) -> str:
    place = str(path)
    return place if place.isprintable() and len(place) <= 4096 else shown(place)


def find_text(path: Path, *, limit: int, hint: str | None = None) -> str | None:
    """Reads a UTF-8 file of at most `limit` bytes. Returns None if it does not exist. Raises UsageError that names the file."""
    try:
        raw = read_plain(path, limit=limit + 1)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        why = getattr(error, "strerror", None) or error
        raise unusable(f"{_named(path)}: cannot be read: {why}", error, hint=hint) from None
    if len(raw) > limit:
        raise _refused(path, f"is larger than {limit:,} bytes, the limit for such a file", hint)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _refused(path, f"is not valid JSON: not UTF-8 at byte {error.start}", hint) from None


def find_object(
    path: Path, *, limit: int, finite: bool = True, names: bool = False, hint: str | None = None
) -> dict[str, Any] | None:
    """Reads the JSON object in a file. Returns None if the file does not exist. Raises UsageError that names the file (see
    `parsed`)."""
    text = find_text(path, limit=limit, hint=hint)
    return None if text is None else object_in(path, text, finite=finite, names=names, hint=hint)


def object_in(path: Path, text: str, *, finite: bool = True, names: bool = False, hint: str | None = None) -> dict[str, Any]:
    """Parses the text of `path` as a JSON object."""
    try:
        value = parsed(text, finite=finite, names=names)
    except UsageError as error:
        raise _refused(path, f"is {error.message}", hint) from None
    if not isinstance(value, dict):
        raise _refused(path, "is not a JSON object", hint)
    return value


def read_object(path: Path, *, limit: int, finite: bool = True, names: bool = False, hint: str | None = None) -> dict[str, Any]:
    """Reads the JSON object in a file. Raises UsageError if the file does not exist."""
    found = find_object(path, limit=limit, finite=finite, names=names, hint=hint)
    if found is None:
        raise _refused(path, f"cannot be read: {os.strerror(2)}", hint)
    return found
