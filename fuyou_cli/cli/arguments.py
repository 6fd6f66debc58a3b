"""Define the arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_RECIPE_HELP = "A recipe file, or the name of a shipped one (default: ./recipe.yaml)."
_OVERRIDES_HELP = "Change keys of the recipe, e.g. optimizer.lr=3e-6; key=null clears one."

RecipeArgument = Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one.")]
OptionalRecipe = Annotated[str | None, typer.Argument(help=_RECIPE_HELP, show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="key=value", help=_OVERRIDES_HELP, show_default=False)]
Calibrated = Annotated[bool, typer.Option("--calibrated", help="Use the rates that the latest run on this machine showed.")]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace", metavar="FILE", help="Write what was busy when in the newest steps, for ui.perfetto.dev.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write the result as JSON.")]
