"""Reads plain data (from JSON or YAML) into frozen dataclasses, with values of exactly the declared types.

`typing.Annotated` with pydantic's `Field` narrows a field. Its `BeforeValidator` accepts another spelling of a value.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, SchemaValidator
from pydantic_core.core_schema import no_info_before_validator_function

from .errors import UsageError
from .json_files import shown
from .printable import one_line

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
        found: Kind = validator.validate_python(data)
    except ValidationError as error:
        details = error.errors(include_url=False)[:_MOST_PROBLEMS]
        raise WrongData([_problem(kind, detail) for detail in details]) from None
    return found


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
    found: Any = {**_LIMITS.get(str(schema.get("type")), {}), **parts}
    if schema.get("type") in ("dataclass-args", "dict"):
        found = no_info_before_validator_function(_not_vast, found)
    return found


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
        name = name if name.isprintable() and len(name) <= 80 else shown(name)
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
