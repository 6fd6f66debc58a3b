"""JSON data into frozen dataclasses, by the types they declare and nothing else: no default is filled in, no value bent to
fit. The first thing that is wrong is named by its key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..core.errors import UsageError

_WORDS = {int: "a whole number of at least 0", float: "a finite number of at least 0", str: "text", bool: "true or false"}
LARGEST = (1 << 63) - 1  # of a whole number: what the store's signed 64-bit addresses reach


def made(kind: type[Any], data: object, where: str = "") -> Any:
    """One `kind`. Raises UsageError naming the key: unknown, missing, of another type, negative or not finite."""
    if not isinstance(data, Mapping):
        raise _wrong(where or "the whole", "keys and values are", data)
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    for name in names:
        if name not in data:
            raise UsageError(f"{_join(where, name)}: missing")
    for key in data:
        if key not in names:
            raise UsageError(f"{_join(where, str(key))}: unknown key")
    return kind(**{name: _value(hints[name], data[name], _join(where, name)) for name in names})


def _value(hint: Any, value: object, where: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if hint in _WORDS:
        return _plain(hint, value, where)
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


def _plain(kind: type, value: object, where: str) -> Any:
    right = type(value) is kind or (kind is float and type(value) is int)
    if right and kind in (int, float):
        right = math.isfinite(value) and 0 <= value <= (LARGEST if kind is int else math.inf)  # type: ignore[arg-type,operator]
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
    shown = repr(value)
    return UsageError(f"{where}: {wanted} wanted, not {shown if len(shown) <= 40 else shown[:37] + '...'}")


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
