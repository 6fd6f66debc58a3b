"""Reads small JSON files that somebody else may have written, or that a crash may have cut short: whole, or not at all. Makes
frozen dataclasses of them, with values of exactly the declared types.

A general parser accepts more than our files contain: duplicate keys, `NaN`, numbers of any length, very deep nesting. Here each
is an error that names the file. `typing.Annotated` with pydantic's `Field` narrows a field of a dataclass; its
`BeforeValidator` accepts another spelling of a value. Foreign text is printed with control, bidirectional and invisible
characters spelled out.
"""

from __future__ import annotations

import difflib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, SchemaValidator
from pydantic_core.core_schema import no_info_before_validator_function

from .disk import unusable
from .errors import UsageError
from .paths import read_plain

# ---- foreign text ----------------------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """Spells every invisible character as Python does (`\\x1b`, `\\u202e`). Newlines stay."""
    return "\n".join(map(one_line, text.split("\n")))


def one_line(text: str) -> str:
    """Spells newlines too. A name with one could otherwise forge the next line."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


# ---- JSON ------------------------------------------------------------------------------------------------------------


DEEPEST = 64  # levels of nested objects and lists
MOST_DIGITS = 300  # of one number; a whole number of this length still fits a float
MOST_VALUES = 4_000_000  # of one text; an empty list has two characters but takes seventy bytes of memory


def shown(name: str) -> str:
    """Makes a name from a file safe to print: quoted, control characters escaped, very long names cut."""
    return ascii(name) if len(name) <= 200 else ascii(name[:200]) + "..."


def legible(name: str, most: int = 4096) -> str:
    """Returns a name as it is where that is safe to print."""
    return name if name.isprintable() and len(name) <= most else shown(name)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object from the pairs of `object_pairs_hook`. Raises ValueError for a duplicate key."""
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {shown(twice)} occurs twice")
    return members


def is_deeper(value: object, depth: int = DEEPEST) -> bool:
    """Whether lists and objects are nested more than `depth` deep. Goes level by level, without recursion."""
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
    """Whether a text may hold more than MOST_VALUES values. Commas and brackets inside strings count too."""
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
    return UsageError(f"{legible(str(path))}: {what}", hint=hint)


def find_text(path: Path, *, limit: int, hint: str | None = None) -> str | None:
    """Reads a UTF-8 file of at most `limit` bytes. Returns None if it does not exist. Raises UsageError that names the file."""
    try:
        raw = read_plain(path, limit=limit + 1)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        why = getattr(error, "strerror", None) or error
        raise unusable(f"{legible(str(path))}: cannot be read: {why}", error, hint=hint) from None
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
    content = find_object(path, limit=limit, finite=finite, names=names, hint=hint)
    if content is None:
        raise _refused(path, f"cannot be read: {os.strerror(2)}", hint)
    return content


# ---- data into dataclasses -------------------------------------------------------------------------------------------


LARGEST = (1 << 63) - 1  # limit of a whole number that declares no other; the store's addresses are signed 64-bit
_MOST_KEYS = 1000  # of one object, because each wrong key gives its own error
_MOST_PROBLEMS = 100

_LIMITS: dict[str, dict[str, Any]] = {  # pydantic's name of a type -> limits, unless a field declares others
    "int": {"strict": True, "ge": 0, "le": LARGEST},
    "float": {"strict": True, "ge": 0, "allow_inf_nan": False},
    "str": {"strict": True},
    "bool": {"strict": True},
    "tuple": {"fail_fast": True},  # the first wrong item of a list is enough
    "dataclass-args": {"extra_behavior": "forbid"},
}
_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "model_type": "a section: keys, indented below it",
    "dict_type": "a section: keys, indented below it",
    "dataclass_type": "keys and values",
    "tuple_type": "a list",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}
Kind = TypeVar("Kind")


class WrongData(UsageError):
    """Reports data of another shape. The message is the first of `problems`. Each begins with its key."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems[0])


def from_json(kind: type[Kind], data: object, *, defaults: bool = False) -> Kind:
    """Makes one `kind`. Keys with a default may be missing if `defaults`. Raises WrongData with every wrong key and value."""
    try:
        validator = _validator(kind, defaults)  # type: ignore[arg-type]  # mypy takes the class for an instance
        value: Kind = validator.validate_python(data)
    except ValidationError as error:
        details = error.errors(include_url=False)[:_MOST_PROBLEMS]
        raise WrongData([_problem(kind, detail) for detail in details]) from None
    return value


@cache
def _validator(kind: type[Any], defaults: bool) -> SchemaValidator:
    return SchemaValidator(_narrowed(TypeAdapter(kind).core_schema, defaults))


def _narrowed(schema: Any, defaults: bool) -> Any:
    """Applies `_LIMITS` throughout a pydantic schema, and removes its defaults unless `defaults`."""
    if isinstance(schema, (list, tuple)):
        return type(schema)(_narrowed(part, defaults) for part in schema)
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "default" and not defaults:
        return _narrowed(schema["schema"], defaults)
    kept = ("default", "metadata")
    parts = {key: value if key in kept else _narrowed(value, defaults) for key, value in schema.items()}
    narrowed: Any = {**_LIMITS.get(str(schema.get("type")), {}), **parts}
    if schema.get("type") in ("dataclass-args", "dict"):
        narrowed = no_info_before_validator_function(_not_vast, narrowed)
    return narrowed


def _not_vast(data: Any) -> Any:
    if isinstance(data, dict) and len(data) > _MOST_KEYS:
        raise ValueError(f"has {len(data):,} keys, at most {_MOST_KEYS:,} are allowed")
    return data


def _problem(kind: type[Any], detail: ErrorDetails) -> str:
    where, key = show_path(detail["loc"]) or "the whole", detail["loc"][-1] if detail["loc"] else ""
    if detail["type"] == "missing":
        return f"{where}: missing"
    if detail["type"] == "unexpected_keyword_argument":
        known = [field.name for field in fields(kind)] if len(detail["loc"]) == 1 else []
        near = difflib.get_close_matches(str(key)[:80], known, n=1)
        return f"{where}: unknown key" + (f" (did you mean {near[0]}?)" if near else "")
    return f"{where}: {reason(detail)}"


def reason(detail: ErrorDetails) -> str:
    """Says what is wrong with a value, for example "expected a whole number, got 3.5"."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, got {show_value(value)}"
    if kind == "literal_error":
        return f"expected {context['expected']}, got {show_value(value)}"
    if kind in _BOUNDS:
        word, bound = _BOUNDS[kind]
        return f"must be {word} {show_value(context[bound])}, got {show_value(value)}"
    if kind == "too_long":
        return f"expected {context['max_length']} values, got {show_value(context['actual_length'])}"
    if kind in ("too_short", "string_too_short"):
        return "must not be empty"
    if kind == "value_error" or isinstance(value, (list, dict)):
        return detail["msg"].removeprefix("Value error, ")
    return f"{detail['msg']}, got {show_value(value)}"


def show_path(path: Sequence[str | int]) -> str:
    """Formats a path of keys and positions: `dataset.train[0].path`."""
    text = ""
    for part in path:
        if isinstance(part, int) and not isinstance(part, bool):  # YAML reads some keys as true or as a float
            text += f"[{part}]"
            continue
        name = str(part)
        name = legible(name, most=80)
        text += f".{name}" if text else name
    return text


def show_value(value: object) -> str:
    """Formats any value in at most 60 characters on one line."""
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, (list, tuple)):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 128:  # Python refuses str() of a huge number
        return "a very large number"
    text = f"'{value}'" if isinstance(value, str) else str(value)
    text = one_line(text[:61])
    return text if len(text) <= 60 else f"{text[:57]}..."
