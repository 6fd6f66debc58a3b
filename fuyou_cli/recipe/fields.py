"""Defines value types of a recipe that YAML does not have: sizes, memory limits, `auto`.

One function checks each, so that a wrong value gives one error and not one per member of a union.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from fuyou_cli.core.units import LARGEST_SIZE, LONGEST_TIME, format_time, parse_size, parse_time

Auto = Literal["auto"]
Patterns = TypeVar("Patterns", dict[str, int], tuple[str, ...])

_LARGEST_BLOCK = 1 << 30  # of one I/O, as in native/src/internal.h
_DEEPEST_QUEUE = 256  # I/Os in flight per direction, as there
_LARGEST_WHOLE = 2**31 - 1
_SMALLEST_PLAIN = 1 << 17  # bytes; in a smaller number the unit was forgotten
_FEW = 16
_MOST_THREADS = 1024  # torch crashes when the system has no more of them


def wrong(code: str, reason: str) -> PydanticCustomError:
    """Makes an error: the diagnostic shows `code`, and `reason` completes "`key`: ..."."""
    return PydanticCustomError(code, "{reason}", {"reason": reason})


def without_null(text: str) -> str:
    """Accepts text without null characters, which no file system allows in a name."""
    if "\0" in text:
        raise wrong("out_of_range", "has a null character, but paths and names must not")
    return text


def not_empty(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Accepts a list that is not empty."""
    if not values:
        raise wrong("out_of_range", "must not be empty")
    return values


def few(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Accepts a list that is not long."""
    if len(values) > _FEW:
        raise wrong("out_of_range", f"has {len(values)} entries, but at most {_FEW} are allowed")
    return values


def _size(value: Any) -> int:
    try:
        size = parse_size(value)
    except ValueError:
        raise wrong("wrong_type", "expected a size such as 2GiB, 512MiB or 1.5TB") from None
    if not 0 < size <= LARGEST_SIZE:
        raise wrong("out_of_range", f"a size must be between 1 byte and {format_size(LARGEST_SIZE)}")
    return size


def _size_with_unit(value: Any) -> int:
    """Reads a size. Refuses a small number without a unit: 64 is meant to be 64GiB, not bytes."""
    size = _size(value)
    if size < _SMALLEST_PLAIN and str(value).strip().isdigit():
        raise wrong("out_of_range", f"expected a size with its unit, such as {size}{'GiB' if size < 1024 else 'MiB'}")
    return size


def _time(value: Any) -> int:
    try:
        seconds = parse_time(value)
    except (TypeError, ValueError):  # TypeError: not a text
        raise wrong("wrong_type", "expected a time such as 8h, 90m, 1h30m, 45s or 2d") from None
    if not 0 < seconds <= LONGEST_TIME:
        raise wrong("out_of_range", f"a time must be between 1s and {format_time(LONGEST_TIME)}")
    return seconds


def format_size(size: int) -> str:
    """Formats a size as the shortest text that `parse_size` reads back exactly: 5000000000 is "5GB"."""
    for power in range(5, 0, -1):
        for base, suffix in ((1024, "iB"), (1000, "B")):
            if size % base**power == 0 and size > 0:
                return f"{size // base**power}{'KMGTP'[power - 1]}{suffix}"
    return str(size)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """Holds `auto`, a number of bytes, or a share of the memory that exists."""

    text: str  # as written; --show-config shows it
    size: int | None = None
    share: float | None = None

    @property
    def is_auto(self) -> bool:
        return self.size is None and self.share is None

    def resolve(self, *, total: int, auto: int) -> int:
        """Computes the bytes, given `total` bytes, and the bytes that `auto` stands for."""
        if self.size is not None:
            return self.size
        return auto if self.share is None else int(total * self.share)


def _memory_limit(value: object) -> MemoryLimit:
    if isinstance(value, MemoryLimit):
        return value
    if value == "auto":
        return MemoryLimit(text="auto")
    if isinstance(value, str) and value.rstrip().endswith("%"):
        return MemoryLimit(text=value.strip(), share=_percentage(value))
    try:
        size = _size_with_unit(value)
    except PydanticCustomError as error:
        if error.type == "out_of_range":
            raise
        raise wrong("wrong_type", "expected auto, a size such as 24GiB, or a share such as 90%") from None
    return MemoryLimit(text=value.strip() if isinstance(value, str) else format_size(size), size=size)


def _percentage(text: str) -> float:
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        raise wrong("wrong_type", "expected a share such as 90%") from None
    if not 0 < share <= 1:
        raise wrong("out_of_range", "a share must be above 0% and at most 100%")
    return share


def _auto_or(read: Callable[[object], object]) -> PlainValidator:
    return PlainValidator(lambda value: value if value == "auto" else read(value))


def _whole(least: int, most: int = _LARGEST_WHOLE) -> Callable[[object], int]:
    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong("wrong_type", "expected auto or a whole number")
        if not least <= value <= most:
            bounded = most < _LARGEST_WHOLE or value > most
            range_ = f"from {least} to {most}" if bounded else f"of at least {least}"
            raise wrong("out_of_range", f"must be auto or a whole number {range_}")
        return value

    return read


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong("wrong_type", "expected auto or a number from 0 to 1")
    if not 0 <= value <= 1:
        raise wrong("out_of_range", "must be auto or a number from 0 to 1")
    return float(value)


def _block(value: object) -> int:
    size = _size(value)
    if size % 4096:
        raise wrong("out_of_range", "must be a multiple of 4KiB, because direct I/O moves whole blocks")
    if size > _LARGEST_BLOCK:
        raise wrong("out_of_range", f"must be at most {format_size(_LARGEST_BLOCK)}")
    return size


def _folders(value: object) -> tuple[str, ...]:
    folders = [value] if isinstance(value, str) else value
    if not isinstance(folders, (list, tuple)) or not all(isinstance(folder, str) and folder for folder in folders):
        raise wrong("wrong_type", "expected a folder or a list of folders")
    for folder in folders:
        without_null(folder)
    if len(set(folders)) != len(folders):
        raise wrong("conflict", "names the same folder twice")
    if len(folders) > 16:
        raise wrong("out_of_range", "at most 16 folders are allowed")
    return tuple(folders)


def _compiles(pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise wrong("out_of_range", f"{pattern!r} is not a regular expression: {error}") from None


def of_patterns(values: Patterns) -> Patterns:
    """Accepts a dictionary whose keys are regular expressions, or a list of names that peft puts into one."""
    for pattern in values:
        _compiles(pattern)
    return values


def _module_names(value: object) -> str | tuple[str, ...]:
    if isinstance(value, str) and value:
        _compiles(value)
        return value
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) and name for name in value):
        raise wrong("wrong_type", "expected all-linear, a list of module names, or a regular expression")
    return not_empty(tuple(value))


_SIZE: dict[str, Any] = {"type": ["integer", "string"], "pattern": r"^\s*\d+(\.\d+)?\s*([kKMGTP]i?B|B)?\s*$", "minimum": 1}


def _spelt(**schema: Any) -> WithJsonSchema:
    """Describes the accepted values to an editor."""
    return WithJsonSchema(schema)


def _auto_spelt(kind: str, least: int, most: float | None = None) -> WithJsonSchema:
    bounds = {"minimum": least} if most is None else {"minimum": least, "maximum": most}
    return _spelt(anyOf=[{"const": "auto"}, {"type": kind, **bounds}])


Size = Annotated[int, PlainValidator(_size_with_unit), PlainSerializer(format_size), _spelt(**_SIZE)]
Time = Annotated[
    int, PlainValidator(_time), PlainSerializer(format_time), _spelt(type="string", pattern=r"^\s*(\d+[dhms]\s*)+$")
]
Limit = Annotated[
    MemoryLimit,
    PlainValidator(_memory_limit),
    PlainSerializer(lambda limit: limit.text),
    _spelt(anyOf=[{"const": "auto"}, _SIZE, {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*%\s*$"}]),
]
AutoPositive = Annotated[int | Auto, _auto_or(_whole(1)), _auto_spelt("integer", 1)]
AutoDepth = Annotated[int | Auto, _auto_or(_whole(1, _DEEPEST_QUEUE)), _auto_spelt("integer", 1, _DEEPEST_QUEUE)]
AutoThreads = Annotated[int | Auto, _auto_or(_whole(1, _MOST_THREADS)), _auto_spelt("integer", 1, _MOST_THREADS)]
AutoCount = Annotated[int | Auto, _auto_or(_whole(0)), _auto_spelt("integer", 0)]
AutoShare = Annotated[float | Auto, _auto_or(_share), _auto_spelt("number", 0, 1)]
AutoBlock = Annotated[
    int | Auto,
    _auto_or(_block),
    PlainSerializer(lambda v: v if v == "auto" else format_size(v)),
    _spelt(anyOf=[{"const": "auto"}, _SIZE]),
]
ModuleNames = Annotated[
    str | tuple[str, ...],
    PlainValidator(_module_names),
    PlainSerializer(lambda names: names if isinstance(names, str) else list(names)),
    _spelt(anyOf=[{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]),
]
Folders = Annotated[
    tuple[str, ...],
    PlainValidator(_folders),
    PlainSerializer(list),
    _spelt(anyOf=[{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 16}]),
]


class Section(BaseModel):
    """Defines a part of the recipe: unknown keys are errors, values are not converted, nothing changes after loading.

    `key: null` means "not written", unless null is itself a value of the key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, serialize_by_alias=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_cleared(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return cls._fill({key: value for key, value in data.items() if value is not None or cls._takes_null(key)})

    @classmethod
    def _fill(cls, data: dict[Any, Any]) -> dict[Any, Any]:
        """Adds defaults that depend on which other keys are written."""
        return data

    @classmethod
    def _takes_null(cls, key: object) -> bool:
        field = cls.model_fields.get(key) if isinstance(key, str) else None
        return field is None or type(None) in get_args(field.annotation)
