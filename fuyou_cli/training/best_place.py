"""Says where a run keeps the weights of its lowest evaluation loss, and how much disk that takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..recipe.schema import Recipe

_NAME = "best"


def best_folder(recipe: Recipe, model_dir: Path) -> Path:
    """Returns `best` below the output directory, never the folder the run started from."""
    out = Path(recipe.output_dir).expanduser() / _NAME
    return out.with_name(f"{_NAME}-finetuned") if out.resolve() == model_dir.resolve() else out


def best_copies(recipe: Recipe) -> int:
    """Counts the copies that are still to be written at most: a new one is written beside the old one."""
    if not recipe.eval.keep_best:
        return 0
    return 1 if best_folder(recipe, Path(recipe.model.name_or_path).expanduser()).is_dir() else 2  # a hub's name is no folder
