"""Define the arguments that several commands share, and load the recipe that they name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fuyou_cli.recipe.load import LoadedRecipe

_RECIPE_HELP = "A recipe file, or the name of a shipped one (default: ./recipe.yaml)."
_OVERRIDES_HELP = "Change keys of the recipe, e.g. optimizer.lr=3e-6; key=null clears one."


def complete_recipe(incomplete: str) -> list[str]:
    """Lists shipped recipes and the recipes in this folder, for shell completion."""
    from fuyou_cli.recipe.shipped import shipped_recipes

    here = (str(path) for pattern in ("*.yaml", "*.yml") for path in Path().glob(pattern))
    return sorted(name for name in (*shipped_recipes(), *here) if name.startswith(incomplete))


def complete_key(incomplete: str) -> list[str]:
    """Lists the keys of a recipe, for shell completion."""
    from fuyou_cli.recipe.suggest import known_keys

    keys = known_keys()
    leaves = (key for key in keys if not any(other.startswith(f"{key}.") for other in keys))
    return [f"{key}=" for key in leaves if key.startswith(incomplete)]


RecipeArgument = Annotated[
    str, typer.Argument(help="A recipe file, or the name of a shipped one.", autocompletion=complete_recipe)
]
OptionalRecipe = Annotated[str | None, typer.Argument(help=_RECIPE_HELP, show_default=False, autocompletion=complete_recipe)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="key=value", help=_OVERRIDES_HELP, show_default=False, autocompletion=complete_key)
]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Write a trace of the newest steps, for ui.perfetto.dev.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Write the result as JSON.")]


def loaded_recipe(recipe: str | None, overrides: Sequence[str] | None) -> LoadedRecipe:
    """Loads the recipe of a command line. Raises RecipeErrors if it has errors, UsageError if there is none."""
    from fuyou_cli.recipe.load import load_recipe
    from fuyou_cli.recipe.named import find_recipe, refuse_unmade

    path, texts = find_recipe(recipe, overrides or [])
    loaded = load_recipe(path, texts)
    refuse_unmade(loaded)
    return loaded
