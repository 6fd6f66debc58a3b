"""What was written, before it is known to be right: rules look here, so that they can speak even when other keys are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import PydanticUndefined

from .diagnostics import Path
from .fields import Section
from .schema import Recipe
from .suggest import section_in


class Written:
    """The recipe as plain data, with defaults behind it. Values may have any type."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data

    def get(self, dotted: str) -> Any:
        """Returns the value written, else the default, else None."""
        found = [value for _, value in self.matches(dotted)]
        return found[0] if found else default_of(dotted)

    def has(self, dotted: str) -> bool:
        """Tells whether it is written, and not null."""
        return any(value is not None for _, value in self.matches(dotted))

    def clears(self, dotted: str) -> bool:
        """Tells whether null is written, and nothing else."""
        return any(True for _ in self.matches(dotted)) and not self.has(dotted)

    def whole(self, dotted: str) -> int | None:
        value = self.get(dotted)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def matches(self, dotted: str) -> Iterator[tuple[Path, Any]]:
        """Lists everything written at a path, where `*` stands for each entry of a list."""
        yield from _matches(self._data, dotted.split("."), ())


def _matches(value: Any, parts: list[str], path: Path) -> Iterator[tuple[Path, Any]]:
    if not parts:
        yield path, value
    elif parts[0] == "*":
        for index, item in enumerate(value if isinstance(value, list) else []):
            yield from _matches(item, parts[1:], (*path, index))
    elif isinstance(value, dict) and parts[0] in value:
        yield from _matches(value[parts[0]], parts[1:], (*path, parts[0]))


def default_of(dotted: str) -> Any:
    """Returns the schema's default at a path, None where there is none."""
    section: type[Section] | None = Recipe
    value: Any = None
    for part in dotted.split("."):
        if section is None or part not in section.model_fields:
            return None
        field = section.model_fields[part]
        value = None if field.default is PydanticUndefined else field.default
        section = section_in(field.annotation)
    return value
