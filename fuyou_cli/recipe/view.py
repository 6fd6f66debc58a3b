"""Looks at what was written before it is known to be right, so that rules speak even when other keys are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import PydanticUndefined

from .diagnostics import Path
from .fields import Section
from .schema import Recipe
from .suggest import section_in


class Written:
    """Holds the recipe as plain data, with defaults behind it. Values may have any type."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data

    def get(self, dotted: str) -> Any:
        """Returns the value written, else the default, else None."""
        return next((value for _, value in self.matches(dotted)), default_of(dotted))

    def has(self, dotted: str) -> bool:
        """Tells whether it is written, and not null."""
        return any(value is not None for _, value in self.matches(dotted))

    def clears(self, dotted: str) -> bool:
        """Tells whether null is written, and nothing else."""
        return any(self.matches(dotted)) and not self.has(dotted)

    def whole(self, dotted: str) -> int | None:
        value = self.get(dotted)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def matches(self, dotted: str) -> Iterator[tuple[Path, Any]]:
        """Lists everything written at a path, where `*` stands for each entry of a list."""
        found: list[tuple[Path, Any]] = [((), self._data)]
        for part in dotted.split("."):
            if part == "*":
                found = [((*path, i), item) for path, at in found if isinstance(at, list) for i, item in enumerate(at)]
            else:
                found = [((*path, part), at[part]) for path, at in found if isinstance(at, dict) and part in at]
        yield from found


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
