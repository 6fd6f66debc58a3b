"""Runs `fuyou init`: asks three questions and writes a recipe that validates."""

from __future__ import annotations

from pathlib import Path

from fuyou_cli.core.errors import UsageError
from fuyou_cli.recipe.first_recipe import write_first_recipe

from .console import asked, write_status


def run_init(target: Path, *, model: str | None, data: str | None, memory: str | None, directory: str | None) -> None:
    """Writes a recipe from the answers and options. Raises UsageError if the file exists, RecipeErrors if an answer is not
    valid; then no file is left."""
    if target.is_dir():
        target = target / "recipe.yaml"
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target} already exists", hint="name another file: fuyou init FILE")
    model, data, memory, directory = _answers(model, data, memory, directory)
    write_first_recipe(target, model, data, memory, directory)
    note = f"{data} does not exist yet" if not Path(data).expanduser().exists() else _flaw(target)
    if note:
        write_status(f"note: {note}")
    write_status(f"wrote {target}. Next: fuyou plan {target}")


def _flaw(recipe: Path) -> str:
    """Tells what a run would say of the data, if it would refuse it."""
    from fuyou_cli.data.sources import look
    from fuyou_cli.recipe.load import load_recipe

    try:
        look(load_recipe(recipe).recipe.dataset)
    except UsageError as error:
        return f"{error.message}; {error.hint}" if error.hint else error.message
    return ""


def _answers(
    model: str | None, data: str | None, memory: str | None, directory: str | None
) -> tuple[str, str, str, str | None]:
    """Asks for what no option gives. With model and data given, it asks nothing."""
    told = model is not None and data is not None
    model = model or asked("Which model? A folder, or a hub id such as Qwen/Qwen3-0.6B", otherwise="")
    data = data or asked("Which data? A file of jsonl, json, csv, parquet or txt", otherwise="")
    if not model or not data:
        raise UsageError("a recipe needs a model and data", hint="fuyou init --model MODEL --data FILE")
    if memory is None and directory is None and not told:
        question = "How much RAM may it use, and in which folder does the rest go? For example `16GiB /mnt/nvme/fuyou`, or 50%"
        memory, _, place = asked(question, otherwise="auto").partition(" ")
        directory = place.strip() or None
    return model, data, memory or "auto", directory
