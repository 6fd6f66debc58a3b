"""Describes a recipe's keys: as JSON Schema, so that editors complete and check it, and as a page in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .schema import Recipe, format_size


def recipe_schema() -> dict[str, Any]:
    """Makes the schema, for editors."""
    schema = Recipe.model_json_schema()
    for section in (schema, *schema.get("$defs", {}).values()):
        for field in section.get("properties", {}).values():
            if isinstance(field.get("default"), dict) and "text" in field["default"]:  # a memory limit, as written
                field["default"] = field["default"]["text"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "fuyou recipe",
        "description": "A fine-tuning run, as `fuyou finetune` takes it.",
    }  # fmt: skip


# ---- the page --------------------------------------------------------------------------------------------------------


_HEAD = """# Keys of a recipe

Written by `fuyou schema --reference`. Sizes are written as `64GiB` or `1.5TB`, times as `8h` or `1h30m`. A key that is left out
has its default. Any key can be given on the command line: `fuyou plan recipe.yaml train.batch_size=32`.
"""
_TABLE = "| key | value | default | what it does |\n| --- | --- | --- | --- |"


def reference() -> str:
    """Returns the page: a section of keys after the other."""
    schema = recipe_schema()
    return "\n".join([_HEAD, *_section(schema, schema, "")]).rstrip("\n")


def _section(schema: dict[str, Any], section: dict[str, Any], path: str) -> Iterator[str]:
    """Yields the lines of a section's own keys, then those of the sections inside."""
    inside: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    rows = []
    for key, field in section["properties"].items():
        name = f"{path}.{key}" if path else key
        if (nested := _nested(schema, field)) is not None:
            inside.append((name, field, nested))
            if "$ref" in field:
                continue
        values = "section" if nested is not None and "array" not in _kinds(field) else _values(field)
        default = "required" if key in section.get("required", ()) else _default(field)
        rows.append(f"| `{key}` | {values} | {default} | {field['description']} |")
    if path:
        yield f"## {path}\n"
    yield from (_TABLE, *rows, "")
    for name, field, nested in inside:
        yield from _section(schema, nested, f"{name}[]" if "array" in _kinds(field) else name)


def _nested(schema: dict[str, Any], field: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the section that a key holds, or each entry of its list."""
    for part in (field, field.get("items", {}), *field.get("anyOf", ())):
        if "$ref" in part:
            found: dict[str, Any] = schema["$defs"][part["$ref"].rpartition("/")[2]]
            return found
    return None


def _kinds(field: dict[str, Any]) -> list[str]:
    found = field.get("type", [])
    return found if isinstance(found, list) else [found]


def _values(field: dict[str, Any]) -> str:
    """Says which values a key takes."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_values(part) for part in field["anyOf"]))
    if "enum" in field:
        return ", ".join(map(_code, field["enum"]))
    if "const" in field:
        return _code(field["const"])
    kinds = _kinds(field)
    if "pattern" in field:
        return "share, as `90%`" if "%" in field["pattern"] else "size" if "integer" in kinds else "time"
    if "array" in kinds:
        parts = field.get("prefixItems")
        return f"list of {len(parts)} numbers" if parts else f"list of {_plural(_values(field.get('items', {})))}"
    words = {"null": "`null`", "boolean": "`true`, `false`", "string": "text", "object": "mapping"}
    return next((words[kind] for kind in kinds if kind in words), None) or _number(field, kinds)


def _number(field: dict[str, Any], kinds: list[str]) -> str:
    name = "whole number" if "integer" in kinds else "number" if kinds else "section"
    low, above = field.get("minimum"), field.get("exclusiveMinimum")
    high, below = field.get("maximum"), field.get("exclusiveMaximum")
    bounds = [f"from {low:,}" if low is not None else "", f"above {above:,}" if above is not None else ""]
    bounds += [f"to {high:,}" if high is not None and high < 2**24 else "", f"below {below:,}" if _is_near(below) else ""]
    return " ".join(filter(None, (name, *bounds)))


def _is_near(bound: float | None) -> bool:
    """Tells whether a bound says more than that a number fits the machine."""
    return bound is not None and bound < 2**24


def _default(field: dict[str, Any]) -> str:
    """Formats the default as a recipe has it."""
    value: Any = field.get("default", {} if "object" in _kinds(field) else None)
    is_size = isinstance(value, int) and "pattern" in field
    return _code(format_size(value) if is_size else value)


def _plural(word: str) -> str:
    return {"text": "texts", "section": "entries"}.get(word, word)


def _code(value: Any) -> str:
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"
