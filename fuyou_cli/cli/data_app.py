"""Defines `fuyou data`."""

from __future__ import annotations

from typing import Annotated

import typer

from .arguments import Json, OptionalRecipe, Overrides, loaded_recipe


def data(
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    number: Annotated[int, typer.Option("-n", min=0, help="Rows to show, in the order of training.")] = 2,
    json_output: Json = False,
) -> None:
    """Show the data of a recipe as the model will see it.

    Counts what is read, cut and left out, and why; shows how long samples are, and the first rows of training with what of them
    is trained. Makes the rows as `fuyou finetune` does. Needs the tokenizer, but neither the model's weights nor a GPU.
    """
    from .data_command import run_data

    run_data(loaded_recipe(recipe, overrides).recipe, number=number, json_output=json_output)
