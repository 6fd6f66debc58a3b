"""Describes a recipe as JSON Schema, so that editors complete and check it. It is generated from `schema`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .fields import Section
from .meanings import MEANINGS
from .schema import Recipe
from .suggest import section_in
from .unbuilt import UNBUILT, is_built


def recipe_schema() -> dict[str, Any]:
    """Makes the schema of what is built today. Leaves out other choices; keys without any choice accept only null."""
    schema = Recipe.model_json_schema()
    sections = {"Recipe": schema, **schema.get("$defs", {})}
    for name, path in _places(Recipe, ()):
        for key, field in sections[name]["properties"].items():
            _narrow(field, (*path, key))
            _describe(field, (*path, key))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "fuyou recipe",
        "description": "A fine-tuning run, as `fuyou finetune` takes it.",
    }  # fmt: skip


def _places(section: type[Section], path: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Lists each section's name with its place; `*` is each entry of a list."""
    yield section.__name__, path
    for name, field in section.model_fields.items():
        if (nested := section_in(field.annotation)) is not None:
            yield from _places(nested, (*path, name) if nested is field.annotation else (*path, name, "*"))


def _describe(field: dict[str, Any], path: tuple[str, ...]) -> None:
    """Says what a key does, where the schema does not say that it is not built."""
    dotted = ".".join(part for part in path if part != "*")
    if (text := MEANINGS.get(dotted)) is not None:
        field.setdefault("description", text)


def _narrow(field: dict[str, Any], path: tuple[str, ...]) -> None:
    """Removes from a key's schema what `unbuilt` refuses."""
    if isinstance(field.get("default"), dict) and "text" in field["default"]:  # a memory limit, as written
        field["default"] = field["default"]["text"]
    for part in (field, field.get("items", {}), *field.get("anyOf", ())):
        if "enum" in part:
            part["enum"] = [value for value in part["enum"] if is_built(path, value)]
    row = next((row for row in UNBUILT if row.path == ".".join(path) and row.asks("a value") and row.asks([1])), None)
    if row is not None and not any("enum" in part for part in (field, *field.get("anyOf", ()))):
        kept = field.get("default")
        field.clear()
        field |= {"const": kept, "default": kept, "description": f"Not built yet: {row.feature}."}
