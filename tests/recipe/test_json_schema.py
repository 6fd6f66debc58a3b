"""Tests that `fuyou schema` takes what a recipe may say, and nothing that is refused for its shape alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.recipe.named import shipped_recipes
from fuyou_cli.recipe.rules import known_keys
from fuyou_cli.recipe.schema import recipe_schema, reference

from .conftest import VALID

SCHEMA = recipe_schema()
_TYPES = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None),
}  # fmt: skip
_KNOWN = {
    "$ref", "$defs", "$schema", "anyOf", "const", "enum", "type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "minLength", "pattern", "properties", "additionalProperties", "required", "items", "prefixItems", "minItems", "maxItems",
    "title", "description", "default",
}  # fmt: skip


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Checks as any validator does, of the words that this schema uses."""
    assert set(schema) <= _KNOWN, set(schema) - _KNOWN
    if "$ref" in schema:
        return fits(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]])
    kinds = schema.get("type", list(_TYPES))
    kinds = kinds if isinstance(kinds, list) else [kinds]
    flat = isinstance(value, bool) and not {"boolean"} & set(kinds)
    if flat or not any(isinstance(value, _TYPES[kind]) for kind in kinds):
        return False
    if "anyOf" in schema and not any(fits(value, part) for part in schema["anyOf"]):
        return False
    if ("const" in schema and value != schema["const"]) or ("enum" in schema and value not in schema["enum"]):
        return False
    if isinstance(value, dict):
        return _object_fits(value, schema)
    if isinstance(value, list):
        parts = schema.get("prefixItems", [schema.get("items", {})] * len(value))
        few = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return few and all(map(fits, value, parts))
    if isinstance(value, str):
        return len(value) >= schema.get("minLength", 0) and re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high = schema.get("minimum", value), schema.get("maximum", value)
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        return low <= value <= high and (above is None or value > above) and (below is None or value < below)
    return True


def _object_fits(value: dict[str, Any], schema: dict[str, Any]) -> bool:
    properties, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
    if set(schema.get("required", ())) - set(value):
        return False
    return all(
        fits(item, properties[key]) if key in properties else rest is not False and fits(item, rest)
        for key, item in value.items()
    )


def _plain(text: str) -> Any:
    return OmegaConf.to_container(OmegaConf.create(text), resolve=True)


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_fit_as_written_and_with_every_default(name: str) -> None:
    path = shipped_recipes()[name]
    assert fits(_plain(path.read_text()), SCHEMA)
    assert fits(load_recipe(path).recipe.model_dump(mode="json"), SCHEMA)


@pytest.mark.parametrize(
    "changed",
    [
        "sed: 1", "seed: x", "train: {batch_size: 0}", "offload: {max_memory: {cpu: much}}", "offload: {lookahead: 0}",
        "train: {max_time: soon}", "offload: {defer_updates: 1.5}", "model: {name: x}", "dataset: {train: x.jsonl}",
        "version: 2", "offload: {device: tpu}", "eval: {samples: {prompts: []}}",
        f"eval: {{samples: {{prompts: {['x'] * 17}}}}}",
    ],
)  # fmt: skip
def test_what_is_refused_for_its_shape_does_not_fit(changed: str, tmp_path: Any) -> None:
    content = {**_plain(VALID), **_plain(changed)}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(Exception, match=r"error\["):
        load_recipe(path)
    assert not fits(content, SCHEMA) and fits(_plain(VALID), SCHEMA)


def _keys(schema: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, field in schema["properties"].items():
        found.append(prefix + key)
        parts = [field, field.get("items", {}), *field.get("anyOf", [])]
        for named in filter(None, (part.get("$ref") for part in parts)):
            found += _keys(SCHEMA["$defs"][named.rpartition("/")[2]], f"{prefix}{key}.")
    return found


def test_the_reference_page_explains_every_key() -> None:
    """Each is a row of its section with values, default and meaning; a section is a heading."""
    found, section = set[str](), ""
    for line in reference().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ").replace("[]", "")
            found.add(section)
        elif line.startswith("| `"):
            key, values, default, meaning = (cell.strip() for cell in line.strip("|").split(" | "))
            assert values and default and meaning.endswith("."), line
            found.add(".".join(filter(None, (section, key.strip("` ")))))
    assert found == set(known_keys())
    assert "| `max_shard_size` | size | `5GB` |" in reference() and "`bfloat16`, `float32` | `bfloat16`" in reference()


def test_it_has_every_key() -> None:
    assert set(_keys(SCHEMA)) == set(known_keys())
    text = str(SCHEMA)
    assert "MemoryLimit" not in text and "'share'" not in text
