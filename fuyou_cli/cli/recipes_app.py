"""Defines `fuyou recipes`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .arguments import Json, complete_recipe

ShippedName = Annotated[str, typer.Argument(help="A name from `recipes ls`.", autocompletion=complete_recipe)]
recipes = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, show and copy the shipped recipes.")


@recipes.command("ls")
def recipes_ls(json_output: Json = False) -> None:
    """List the shipped recipes."""
    from .recipes_cmd import run_ls

    run_ls(json_output=json_output)


@recipes.command("show")
def recipes_show(name: ShippedName, json_output: Json = False) -> None:
    """Print a shipped recipe."""
    from .recipes_cmd import run_show

    run_show(name, json_output=json_output)


@recipes.command("cp")
def recipes_cp(
    name: ShippedName,
    target: Annotated[Path, typer.Argument(help="The file to write; it must not exist.")] = Path("recipe.yaml"),
) -> None:
    """Copy a shipped recipe, for editing."""
    from .recipes_cmd import run_cp

    run_cp(name, target)
