"""Runs `fuyou data`: the rows that a run would train on, made as a run makes them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .console import result_console, status_console, write_json, write_status

if TYPE_CHECKING:
    from fuyou_cli.recipe.schema import Recipe
    from fuyou_cli.training.shown_data import Seen


def run_data(recipe: Recipe, *, number: int, json_output: bool) -> None:
    """Shows counts, lengths and the first `number` rows of training."""
    from fuyou_cli.training.shown_data import seen

    from .render.data_screen import show_data
    from .render.transfer import Transfers

    with Transfers(status_console()) as progress:
        found = seen(recipe, number, whole=json_output, say=write_status, progress=progress)
    if json_output:
        write_json(_as_data(found))
        return
    show_data(result_console(), found)


def _as_data(seen: Seen) -> dict[str, Any]:
    left_out = ("preview", "pad_id", "digest", "highest_token_id", "formats")
    summary = {name: value for name, value in asdict(seen.summary).items() if name not in left_out}
    return {
        **summary,
        "formats": [{"path": path, "format": name} for path, name in seen.summary.formats],
        "notes": [*seen.summary.notes, *([seen.note] if seen.note else [])],
        "steps": seen.steps,
        "eval": {
            name: {"rows": one.rows, "tokens": one.tokens, "label_tokens": one.label_tokens} for name, one in seen.sets.items()
        },
        "shown": [
            {
                "row": row.row,
                "tokens": row.tokens,
                "label_tokens": row.trained,
                "documents": [
                    [{"text": text, "trained": trained} for text, trained in document] for document in row.documents
                ],
            }
            for row in seen.shown
        ],
    }  # fmt: skip
