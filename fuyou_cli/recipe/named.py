"""Finds the recipe that a command names: a file, or a shipped one."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from ..core.errors import UsageError
from ..core.printable import printable
from .load import LoadedRecipe
from .shipped import shipped_recipes, summary

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
    raise UsageError(f"there is no file {recipe!r}, nor a shipped recipe of this name", hint=_offer(recipe))


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
    return "\n".join([first, *(f"    {line}" for line in listed())])


def listed() -> list[str]:
    """Returns a line for each shipped recipe."""
    shipped = shipped_recipes()
    width = max(map(len, shipped), default=0)
    return [f"{name:<{width}}  {summary(path)}" for name, path in shipped.items()]


def config_text(loaded: LoadedRecipe) -> str:
    """Formats every key with its value, defaults included, as a recipe that loads again. YAML itself spells unprintable
    characters."""
    import yaml

    def text(*, unicode: bool) -> str:
        values = loaded.recipe.model_dump(mode="json")
        return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=unicode, default_flow_style=False)).rstrip("\n")

    shown = text(unicode=True)
    return shown if printable(shown) == shown else text(unicode=False)


def shipped_file(name: str) -> Path:
    """Finds a shipped recipe by its name. Raises UsageError."""
    path = shipped_recipes().get(name.removesuffix(".yaml"))
    if path is None:
        raise UsageError(f"no such shipped recipe: {name!r}", hint=_offer(name))
    return path
