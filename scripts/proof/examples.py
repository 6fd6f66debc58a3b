"""Makes a small value of a frozen dataclass by its declared types: what a file of it looks like, whatever its fields are."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

_PLAIN: dict[Any, Any] = {int: 1, float: 1.0, str: "x", bool: False, Any: 1}
Kind = TypeVar("Kind")


def example(kind: type[Kind]) -> Kind:
    """Returns a value of ones, with one item of everything that there may be several of."""
    found = _of(kind)
    assert isinstance(found, kind)
    return found


def _of(hint: Any) -> Any:
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return inner[0]
    if origin is Annotated:
        return _of(inner[0])
    if origin is tuple:
        return (_of(inner[0]),) if inner[-1] is Ellipsis else tuple(map(_of, inner))
    if origin is dict:
        return {"x": _of(inner[1])}
    if isinstance(hint, type) and issubclass(hint, tuple):  # with names
        return hint(*map(_of, get_type_hints(hint).values()))
    if is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        return hint(**{field.name: _of(hints[field.name]) for field in fields(hint) if field.init})  # type: ignore[operator]
    return _of(next(one for one in inner if one is not NoneType))  # `int | None`
