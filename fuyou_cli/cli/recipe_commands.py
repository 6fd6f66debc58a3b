"""Runs the commands that are about recipes: `fuyou init`, `validate`, `schema`, `recipes` and `quickstart`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.units import duration, gib
from fuyou_cli.data.sources import look
from fuyou_cli.recipe.diagnostics import RecipeErrors
from fuyou_cli.recipe.load import LoadedRecipe, load_recipe
from fuyou_cli.recipe.named import config_text, find_recipe, listed, shipped_file, shipped_recipes, summary, write_first_recipe
from fuyou_cli.recipe.schema import recipe_schema, reference

from .console import asked, status_console, write_document, write_json, write_last_result, write_result, write_status


def loaded_with_notes(recipe: str | None, overrides: Sequence[str], *, shown: bool = True) -> LoadedRecipe:
    """Loads the recipe that a command names, and shows its notes. Raises RecipeErrors if it has errors, UsageError if there is
    none."""
    loaded = load_recipe(*find_recipe(recipe, overrides))
    for note in loaded.notes if shown else ():
        write_status(note)
    return loaded


# ---- init ----------------------------------------------------------------------------------------------------------------


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
    """Says what a run would say of the data, if it would refuse it."""
    try:
        look(load_recipe(recipe).recipe.dataset)
    except UsageError as error:
        return f"{error.message}; {error.hint}" if error.hint else error.message
    return ""


def _answers(
    model: str | None, data: str | None, memory: str | None, directory: str | None
) -> tuple[str, str, str, str | None]:
    """Asks for what no option gives. With model and data given, it asks nothing."""
    is_complete = model is not None and data is not None
    model = model or asked("Which model? A folder, or a hub id such as Qwen/Qwen3-0.6B", otherwise="")
    data = data or asked("Which data? A file of jsonl, json, csv, parquet or txt", otherwise="")
    if not model or not data:
        raise UsageError("a recipe needs a model and data", hint="fuyou init --model MODEL --data FILE")
    if memory is None and directory is None and not is_complete:
        question = "How much RAM may it use, and in which folder does the rest go? For example `16GiB /mnt/nvme/fuyou`, or 50%"
        memory, _, place = asked(question, otherwise="auto").partition(" ")
        directory = place.strip() or None
    return model, data, memory or "auto", directory


# ---- validate, schema, recipes ---------------------------------------------------------------------------------------------


def run_validate(recipe: str | None, overrides: Sequence[str], *, json_output: bool, show_config: bool) -> None:
    """Checks a recipe. Raises RecipeErrors if it has errors; with JSON they are also on stdout."""
    try:
        loaded = loaded_with_notes(recipe, overrides)
    except RecipeErrors as error:
        if json_output:
            errors = [diagnostic.as_dict() for diagnostic in error.diagnostics]
            write_json({"valid": False, "recipe": error.name, "errors": errors})
        raise
    path = loaded.path
    if json_output:
        write_json({"valid": True, "recipe": str(path), "errors": [], "config": loaded.recipe.model_dump(mode="json")})
    elif show_config:
        write_document(config_text(loaded))
        write_status(f"{path}: ok")
    else:
        write_result(f"{path}: ok")


def run_schema(*, as_reference: bool) -> None:
    """Prints the schema unchanged, because editors accept no other layout; or the reference page made of it."""
    write_document(reference() if as_reference else json.dumps(recipe_schema(), indent=2))


def run_ls(*, json_output: bool) -> None:
    if json_output:
        entries = [{"name": name, "path": str(path), "summary": summary(path)} for name, path in shipped_recipes().items()]
        write_json({"recipes": entries})
        return
    for line in listed():
        write_result(line)


def run_show(name: str, *, json_output: bool) -> None:
    path = shipped_file(name)
    text = path.read_text(encoding="utf-8")
    if json_output:
        write_json({"name": path.stem, "path": str(path), "summary": summary(path), "text": text})
    else:
        write_document(text.rstrip("\n"))


def run_cp(name: str, target: Path) -> None:
    source = shipped_file(name)
    place = target / source.name if target.is_dir() else target
    try:
        with place.open("xb") as file:  # never overwrites a recipe
            file.write(source.read_bytes())
    except FileExistsError:
        raise UsageError(f"{place} already exists", hint=f"name another file: fuyou recipes cp {name} FILE") from None
    except OSError as error:
        raise UsageError(f"{place} cannot be written: {error.strerror}") from None
    write_status(f"wrote {place}. Next: fuyou plan {place}")


# ---- quickstart ------------------------------------------------------------------------------------------------------


STATE_BYTES = 16  # per parameter in memory: weights and gradients 4 with fp32 masters 4, or 8 in fp32; momentum and variance 8


def run_quickstart(overrides: Sequence[str]) -> int:
    """Shows on one screen what the quickstart proved. Returns the exit code: 0, or the code of a training that ended early and
    has printed why."""
    from fuyou_cli.quickstart.demonstration import PROMPT, demonstrate

    from .render.theme import heading, pairs, say, some

    shown = demonstrate(overrides, say=write_status)
    if isinstance(shown, int):
        return shown
    console, done = status_console(), shown.done
    heading(console, f"Quickstart  {duration(shown.seconds)}")
    in_memory = STATE_BYTES * done.plan["parameters"]
    rows = [
        ("in memory needs", f"{gib(in_memory)} for weights, gradients and optimizer states alone"),
        ("budget", f"{gib(done.plan['budget'])} for the whole process, {shown.held}"),
        ("peak", gib(done.peak) if done.peak else "not measured: no step was left to run"),
        ("loss", f"{done.losses[0]:.4f} to {done.losses[-1]:.4f} in {some(len(done.losses), 'step')}"),
    ]
    pairs(console, [*rows, ("plain PyTorch", shown.compared)] if shown.compared else rows)
    say(console, PROMPT.replace("\n", "  "), indent=2)
    for when, sample in shown.samples.items():
        say(console, f"{when} {' '.join(sample.split())[:100]}", indent=4)
    write_last_result(f"the fine-tuned model is in {done.plan['export']}: AutoModelForCausalLM.from_pretrained loads it")
    return 0
