"""Runs `fuyou recipes` and `fuyou validate`, and finds the recipe that a command names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.printable import printable
from fuyou_cli.recipe.shipped import shipped_recipes, summary

from .console import write_document, write_json, write_result, write_status

if TYPE_CHECKING:
    from fuyou_cli.recipe.load import LoadedRecipe

DEFAULT = Path("recipe.yaml")


def find_recipe(recipe: str | None, overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """Returns the file and the overrides. `fuyou plan a.b=1` changes ./recipe.yaml; `quickstart` is a shipped recipe. Raises
    UsageError that lists the shipped recipes if there is no such file."""
    texts = list(overrides)
    if recipe is not None and "=" in recipe and not Path(recipe).exists():
        texts.insert(0, recipe)
        recipe = None
    if recipe is None:
        if not DEFAULT.exists():
            raise UsageError(f"no recipe given, and ./{DEFAULT} does not exist", hint=_offer())
        return DEFAULT, texts
    path = Path(recipe)
    if path.exists() or path.is_symlink():
        return path, texts
    shipped = shipped_recipes()
    if path.name == recipe and path.name.removesuffix(".yaml") in shipped:
        return shipped[path.name.removesuffix(".yaml")], texts
    raise UsageError(f"no such recipe: {recipe!r}", hint=_offer(recipe))


def refuse_unmade(loaded: LoadedRecipe) -> None:
    """Raises UsageError if the quickstart's recipe is used before the quickstart has made its model. Otherwise the hub would
    be asked for a model of that name."""
    if loaded.path != shipped_recipes().get("quickstart"):
        return
    model = Path(loaded.recipe.model.name_or_path)
    if model == Path("outputs/quickstart/model") and not model.exists():
        raise UsageError(f"{model} does not exist yet", hint="run `fuyou quickstart` first: it makes the model and its text")


def _offer(recipe: str = "") -> str:
    near = difflib.get_close_matches(Path(recipe).stem, list(shipped_recipes()), n=1) if recipe else []
    first = f"did you mean `{near[0]}`? Shipped recipes:" if near else "name one of the shipped recipes:"
    return "\n".join([first, *(f"    {line}" for line in _listed())])


def _listed() -> list[str]:
    shipped = shipped_recipes()
    width = max(map(len, shipped), default=0)
    return [f"{name:<{width}}  {summary(path)}" for name, path in shipped.items()]


def run_validate(recipe: str | None, overrides: Sequence[str], *, json_output: bool, show_config: bool) -> None:
    """Checks a recipe. Raises RecipeErrors if it has errors; with JSON they are also on stdout."""
    from fuyou_cli.recipe.diagnostics import RecipeErrors
    from fuyou_cli.recipe.load import load_recipe

    path, texts = find_recipe(recipe, overrides)
    try:
        loaded = load_recipe(path, texts)
    except RecipeErrors as error:
        if json_output:
            found = [diagnostic.as_dict() for diagnostic in error.diagnostics]
            write_json({"valid": False, "recipe": str(path), "errors": found})
        raise
    if json_output:
        write_json({"valid": True, "recipe": str(path), "errors": [], "config": loaded.recipe.model_dump(mode="json")})
    elif show_config:
        write_document(config_text(loaded))
        write_status(f"{path}: ok")
    else:
        write_result(f"{path}: ok")


def config_text(loaded: LoadedRecipe) -> str:
    """Formats every key with its value, defaults included, as a recipe that loads again. YAML itself spells unprintable
    characters."""
    import yaml

    def text(*, unicode: bool) -> str:
        values = loaded.recipe.model_dump(mode="json")
        return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=unicode, default_flow_style=False)).rstrip("\n")

    shown = text(unicode=True)
    return shown if printable(shown) == shown else text(unicode=False)


def run_schema(*, as_reference: bool) -> None:
    """Prints the schema unchanged, because editors accept no other layout; or the reference page made of it."""
    import json

    if as_reference:
        from fuyou_cli.recipe.reference import reference

        write_document(reference())
        return
    from fuyou_cli.recipe.json_schema import recipe_schema

    write_document(json.dumps(recipe_schema(), indent=2))


def run_ls(*, json_output: bool) -> None:
    if json_output:
        entries = [{"name": name, "path": str(path), "summary": summary(path)} for name, path in shipped_recipes().items()]
        write_json({"recipes": entries})
        return
    for line in _listed():
        write_result(line)


def run_show(name: str, *, json_output: bool) -> None:
    path = _shipped(name)
    text = path.read_text(encoding="utf-8")
    if json_output:
        write_json({"name": path.stem, "path": str(path), "summary": summary(path), "text": text})
    else:
        write_document(text.rstrip("\n"))


def run_cp(name: str, target: Path) -> None:
    source = _shipped(name)
    place = target / source.name if target.is_dir() else target
    try:
        with place.open("xb") as file:  # never overwrites a recipe
            file.write(source.read_bytes())
    except FileExistsError:
        raise UsageError(f"{place} already exists", hint=f"name another file: fuyou recipes cp {name} FILE") from None
    except OSError as error:
        raise UsageError(f"{place} cannot be written: {error.strerror}") from None
    write_status(f"wrote {place}. Next: fuyou plan {place}")


def _shipped(name: str) -> Path:
    path = shipped_recipes().get(name.removesuffix(".yaml"))
    if path is None:
        raise UsageError(f"no such shipped recipe: {name!r}", hint=_offer(name))
    return path
