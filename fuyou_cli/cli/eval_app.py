"""Defines `fuyou eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .arguments import Json, OptionalRecipe, Overrides, loaded_recipe


def evaluate(
    source: Annotated[str, typer.Argument(metavar="MODEL|STORE|OUTPUT", help="A model, a run's store, or a run's output_dir.")],
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    choices: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Questions: JSONL of question, choices, answer.", show_default=False),
    ] = None,
    json_output: Json = False,
) -> None:
    """Show the loss of a model on the eval sets of a recipe.

    Loss and perplexity of each set of dataset.eval, and of the samples that dataset.eval_fraction holds back. The weights pass
    through memory: the model may be larger than offload.max_memory.cpu. Trains and writes nothing. With --choices it answers
    questions instead: the share answered right by log-likelihood (acc), and by log-likelihood per character (acc_norm).
    """
    from fuyou_cli.machine.allocator import settle_allocator

    from .before_torch import settle_libraries
    from .evaluate import run_eval

    loaded = loaded_recipe(recipe, overrides)
    settle_allocator()
    settle_libraries(device=loaded.recipe.offload.device)
    run_eval(source, loaded.recipe, choices=choices, json_output=json_output)
