"""`fuyou recipes`, and finding the recipe that a command names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fuyou_cli.core.errors import UsageError
from fuyou_cli.recipe.shipped import shipped_recipes, summary

from .console import write_document, write_json, write_result, write_status

if TYPE_CHECKING:
    from fuyou_cli.recipe.load import LoadedRecipe

DEFAULT = Path("recipe.yaml")


def find_recipe(recipe: str | None, overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the file and the overrides: `fuyou plan a.b=1` changes ./recipe.yaml, `quickstart` is shipped. Raises UsageError
    with the shipped recipes when there is no such file."""
    texts = list(overrides)
    if recipe is not None and "=" in recipe and not Path(recipe).exists():
        texts.insert(0, recipe)
        recipe = None
    if recipe is None:
        if not DEFAULT.exists():
            raise UsageError(f"no recipe given, and no ./{DEFAULT} here", hint=_offer())
        return DEFAULT, texts
    path = Path(recipe)
    if path.exists() or path.is_symlink():
        return path, texts
    shipped = shipped_recipes()
    if path.name == recipe and path.name.removesuffix(".yaml") in shipped:
        return shipped[path.name.removesuffix(".yaml")], texts
    raise UsageError(f"there is no recipe {recipe!r}", hint=_offer(recipe))


def refuse_unmade(loaded: LoadedRecipe) -> None:
    """Raise UsageError where the quickstart's recipe is used before the quickstart has made its model: the hub would be asked
    for a model of that name."""
    if loaded.path != shipped_recipes().get("quickstart"):
        return
    model = Path(loaded.recipe.model.name_or_path)
    if model == Path("outputs/quickstart/model") and not model.exists():
        raise UsageError(f"there is no {model} here yet", hint="run `fuyou quickstart` first: it makes the model and its text")


def _offer(recipe: str = "") -> str:
    shipped = shipped_recipes()
    near = difflib.get_close_matches(Path(recipe).stem, list(shipped), n=1) if recipe else []
    first = f"did you mean `{near[0]}`? Shipped recipes:" if near else "name one of the shipped recipes:"
    width = max((len(name) for name in shipped), default=0)
    return "\n".join([first, *(f"    {name:<{width}}  {summary(path)}" for name, path in shipped.items())])


def run_ls(*, json_output: bool) -> None:
    shipped = shipped_recipes()
    if json_output:
        entries = [{"name": name, "path": str(path), "summary": summary(path)} for name, path in shipped.items()]
        write_json({"recipes": entries})
        return
    width = max((len(name) for name in shipped), default=0)
    for name, path in shipped.items():
        write_result(f"{name:<{width}}  {summary(path)}")


def run_show(name: str) -> None:
    write_document(_shipped(name).read_text(encoding="utf-8").rstrip("\n"))


def run_cp(name: str, target: Path) -> None:
    source = _shipped(name)
    place = target / source.name if target.is_dir() else target
    try:
        with place.open("xb") as file:  # never over a recipe somebody wrote
            file.write(source.read_bytes())
    except FileExistsError:
        raise UsageError(f"{place} exists", hint=f"name another file: fuyou recipes cp {name} FILE") from None
    except OSError as error:
        raise UsageError(f"{place} cannot be written: {error.strerror}") from None
    write_status(f"wrote {place}. Next: fuyou plan {place}")


def _shipped(name: str) -> Path:
    path = shipped_recipes().get(name.removesuffix(".yaml"))
    if path is None:
        raise UsageError(f"there is no shipped recipe {name!r}", hint=_offer(name))
    return path
