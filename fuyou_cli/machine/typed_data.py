"""Plain data (of JSON or YAML) into the frozen dataclasses that describe a machine: every problem at once, by its key."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fuyou_cli.core.units import LARGEST_RATE, LARGEST_SIZE, parse_rate, parse_size

FLOPS = ("matmul_flops", "forward", "backward", "given")  # everything else in float that is written with a unit is in bytes/s
PLAIN = ("shared_compute", "shared_adamw", "io_cpu", "others_cores", "sustained_share")  # no rates


@dataclass(slots=True)
class Reading:
    """How values are read, and what was wrong. `written`: by a person, so that sizes and rates may have units."""

    written: bool
    problems: list[str] = field(default_factory=list)

    def fields_of(self, kind: type[Any], data: object, *, where: str = "", optional: Collection[str] = ()) -> dict[str, Any]:
        """The values of `data` that are right, by the types that the dataclass `kind` declares. Keys without a default that
        are not `optional` must be there."""
        if not isinstance(data, Mapping):
            self.problems.append(f"{where or 'the whole'}: keys and values are wanted, not {shown(data)}")
            return {}
        hints = get_type_hints(kind)
        needed = [f.name for f in fields(kind) if f.default is MISSING and f.name not in optional]
        self.problems += [f"{_join(where, name)}: missing" for name in needed if name not in data]
        self.problems += [f"{_join(where, str(key))}: unknown key{_meant(key, hints)}" for key in data if key not in hints]
        found: dict[str, Any] = {}
        for key, value in data.items():
            before = len(self.problems)
            if key in hints:
                read = self._value(hints[key], value, _join(where, str(key)), str(key))
                found |= {key: read} if len(self.problems) == before else {}
        return found

    def made(self, kind: type[Any], data: object, where: str) -> Any:
        """One `kind`, or None after a problem."""
        before = len(self.problems)
        values = self.fields_of(kind, data, where=where)
        return kind(**values) if len(self.problems) == before else None

    def _value(self, hint: Any, value: object, where: str, key: str) -> Any:
        try:
            if hint is str:
                return _checked(value, str, "text")
            if hint is int:
                return self._whole(value)
            if hint is float:
                return self._number(value, key)
            if get_origin(hint) is Literal:
                return _one_of(value, get_args(hint))
        except ValueError as error:
            self.problems.append(f"{where}: {error}")
            return None
        if is_dataclass(hint):
            return self.made(hint, value, where)  # type: ignore[arg-type]
        return self._several(get_args(hint), value, where, key)

    def _several(self, inner: tuple[Any, ...], value: object, where: str, key: str) -> Any:
        """A tuple: of as many as there are, or (int, float), which a person writes as a mapping of the pairs."""
        if self.written and isinstance(value, Mapping) and get_origin(inner[0]) is tuple:
            value = [list(pair) for pair in value.items()]
        endless = inner[-1] is Ellipsis
        if not isinstance(value, list) or (not endless and len(value) != len(inner)):
            self.problems.append(f"{where}: a list is wanted, not {shown(value)}")
            return None
        hints = [inner[0]] * len(value) if endless else list(inner)
        return tuple(self._value(h, v, f"{where}[{i}]", key) for i, (h, v) in enumerate(zip(hints, value, strict=True)))

    def _whole(self, value: object) -> int:
        if self.written and isinstance(value, str):
            value = parse_size(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"a whole number{' or a size' if self.written else ''} is wanted, not {shown(value)}")
        if value > LARGEST_SIZE:
            raise ValueError(f"at most {LARGEST_SIZE} is wanted, not {shown(value)}")
        return value

    def _number(self, value: object, key: str) -> float:
        if self.written and key not in PLAIN and isinstance(value, str):
            return parse_rate(value, "FLOP/s" if key in FLOPS else "B/s")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LARGEST_RATE:
            raise ValueError(f"a number from 0 to {LARGEST_RATE:.0e} is wanted, not {shown(value)}")
        return float(value)


def _checked(value: object, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{what} is wanted, not {shown(value)}")
    return value


def _one_of(value: object, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        raise ValueError(f"{' or '.join(map(str, allowed))} is wanted, not {shown(value)}")
    return value


def shown(value: object, most: int = 40) -> str:
    """For a message, however long it is."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _meant(key: object, known: Collection[str]) -> str:
    near = difflib.get_close_matches(str(key), list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
