"""`fuyou validate`: is this a recipe, and what would it mean?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fuyou_cli.core.printable import printable
from fuyou_cli.recipe.diagnostics import RecipeErrors
from fuyou_cli.recipe.load import LoadedRecipe, load_recipe

from .console import write_document, write_json, write_result, write_status
from .recipes_cmd import find_recipe


def run_validate(recipe: str | None, overrides: Sequence[str], *, json_output: bool, show_config: bool) -> None:
    """Raises RecipeErrors when there are any; with JSON they are on stdout as well."""
    path, texts = find_recipe(recipe, overrides)
    try:
        loaded = load_recipe(path, texts)
    except RecipeErrors as error:
        if json_output:
            found = [diagnostic.as_dict() for diagnostic in error.diagnostics]
            write_json({"valid": False, "recipe": str(path), "errors": found})
        raise
    if json_output:
        write_json({"valid": True, "recipe": str(path), "errors": [], "config": config_of(loaded)})
    elif show_config:
        write_document(config_text(loaded).rstrip("\n"))
    else:
        write_result(f"{path}: ok")
    if show_config and not json_output:
        write_status(f"{path}: ok")


def config_of(loaded: LoadedRecipe) -> dict[str, Any]:
    """Every key with its value, defaults included, as plain data."""
    return loaded.recipe.model_dump(mode="json")


def config_text(loaded: LoadedRecipe) -> str:
    """The same as a recipe that loads again. YAML spells the characters that are not printed as they are."""
    import yaml

    def text(*, unicode: bool) -> str:
        return str(yaml.safe_dump(config_of(loaded), sort_keys=False, allow_unicode=unicode, default_flow_style=False))

    shown = text(unicode=True)
    return shown if printable(shown) == shown else text(unicode=False)
