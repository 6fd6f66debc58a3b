"""JSON data into frozen dataclasses, by the types they declare and nothing else: no default is filled in, no value bent to
fit. The first thing that is wrong is named by its key."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ..core.errors import UsageError
from ..core.json_files import shown

_WORDS = {int: "a whole number of at least 0", float: "a finite number of at least 0", str: "text", bool: "true or false"}
_LARGEST_FLOAT = int(sys.float_info.max)
LARGEST = (1 << 63) - 1  # of a whole number: what the store's signed 64-bit addresses reach


@dataclass(frozen=True, slots=True)
class AtMost:
    """`Annotated[int, AtMost(n)]` in a dataclass: whole numbers to n in place of `LARGEST`."""

    largest: int


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """Of each field, in order. Kept: a store's manifest has one dataclass for each tensor of a model."""
    found = get_type_hints(kind, include_extras=True)
    return {field.name: found[field.name] for field in fields(kind)}


def made(kind: type[Any], data: object, where: str = "") -> Any:
    """One `kind`. Raises UsageError naming the key: unknown, missing, of another type, negative or not finite."""
    if not isinstance(data, Mapping):
        raise _wrong(where or "the whole", "keys and values are", data)
    hints = _hints(kind)  # type: ignore[arg-type]  # a class, which mypy takes for one of its instances
    for name in hints:
        if name not in data:
            raise UsageError(f"{_join(where, name)}: missing")
    for key in data:
        if key not in hints:
            raise UsageError(f"{_join(where, str(key))}: unknown key")
    return kind(**{name: _value(hint, data[name], _join(where, name)) for name, hint in hints.items()})


def _value(hint: Any, value: object, where: str) -> Any:
    if hint in _WORDS:
        return _plain(hint, value, where)
    if hint is Any:
        return value
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _plain(inner[0], value, where, largest=inner[1].largest)
    if origin is Literal:
        if type(value) not in {type(one) for one in inner} or value not in inner:
            raise _wrong(where, f"{' or '.join(map(repr, inner))} is", value)
        return value
    if origin in (Union, UnionType):
        (some,) = (one for one in inner if one is not NoneType)
        return None if value is None else _value(some, value, where)
    if origin is tuple:
        return _several(inner, value, where)
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong(where, "names and values are", value)
        return {key: _value(inner[1], one, _join(where, key)) for key, one in value.items()}
    assert is_dataclass(hint), hint
    return made(hint, value, where)  # type: ignore[arg-type]


def _plain(kind: type, value: object, where: str, *, largest: int = LARGEST) -> Any:
    right = type(value) is kind or (kind is float and type(value) is int)
    if right and type(value) is int:  # of which one that is wanted as a float may be too large for that
        right = 0 <= value <= (largest if kind is int else _LARGEST_FLOAT)
    elif right and type(value) is float:
        right = math.isfinite(value) and value >= 0
    if not right:
        raise _wrong(where, f"{_WORDS[kind]} is", value)
    return float(value) if kind is float else value  # type: ignore[arg-type]


def _several(inner: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    endless = inner[-1] is Ellipsis
    if not isinstance(value, list) or (not endless and len(value) != len(inner)):
        raise _wrong(where, "a list is" if endless else f"a list of {len(inner)} is", value)
    hints = [inner[0]] * len(value) if endless else inner
    return tuple(_value(hint, one, f"{where}[{index}]") for index, (hint, one) in enumerate(zip(hints, value, strict=True)))


def _wrong(where: str, wanted: str, value: object) -> UsageError:
    told = repr(value)
    return UsageError(f"{where}: {wanted} wanted, not {told if len(told) <= 40 else told[:37] + '...'}")


def _join(where: str, key: str) -> str:
    name = key if key.isprintable() and len(key) <= 80 else shown(key)
    return f"{where}.{name}" if where else name
