"""Runs `fuyou data`: the rows that a run would train on, made as a run makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .console import result_console, status_console, write_json, write_status

if TYPE_CHECKING:
    from fuyou_cli.recipe.schema import Recipe


def run_data(recipe: Recipe, *, number: int, json_output: bool) -> None:
    """Shows counts, lengths and the first `number` rows of training."""
    from fuyou_cli.training.shown_data import seen

    from .render.data_screen import show_data
    from .render.transfer import Transfers

    with Transfers(status_console()) as progress:
        found = seen(recipe, number, whole=json_output, say=write_status, progress=progress)
    if json_output:
        write_json(found.as_data())
        return
    show_data(result_console(), found)
