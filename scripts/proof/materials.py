"""Makes what both sides train on: the model, the text, and the rows that the data layer makes of it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.length import tokenised_rows

from .verdicts import ROOT, say

LENGTH = 512  # tokens per row
OWN_TEXT_ROWS = 6000
_NAMES = ("Ada", "Bela", "Chidi", "Dana", "Emil", "Farah", "Goro", "Hana", "Ines", "Jonas", "Kofi", "Lena")
_THINGS = ("apples", "bolts", "candles", "drums", "envelopes", "flags", "gloves", "hats", "jars", "kites")


def text_file(work: Path, data: Path | None) -> tuple[Path, dict[str, object], str]:
    """Returns (file, its entry for the recipe's dataset.train, what it is): the file given, or text made here.

    A file with question and answer (as GSM8K has) is read as both, one after the other; any other by its columns."""
    if data is None:
        path = work / "text.jsonl"
        if not path.exists():
            path.write_text(own_text(OWN_TEXT_ROWS), encoding="utf-8")
        return path, {"path": str(path), "format": "prompt_completion"}, "text made here (no --data)"
    path = data.resolve()
    entry: dict[str, object] = {"path": str(path)}
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as file:
            columns = set(json.loads(file.readline()))
        if {"question", "answer"} <= columns:
            entry |= {"format": "prompt_completion", "columns": {"prompt": "question", "completion": "answer"}}
    else:
        entry |= {"format": "text"}
    return path, entry, data.name


def own_text(rows: int) -> str:
    """Writes JSON lines of small sums with their solutions, the same text every time."""
    draw = random.Random(20)
    lines = []
    for _ in range(rows):
        name, other = draw.sample(_NAMES, 2)
        thing = draw.choice(_THINGS)
        first, more, times = draw.randint(2, 90), draw.randint(2, 90), draw.randint(2, 9)
        prompt = (
            f"{name} has {first} {thing} and finds {more} more. {other} has {times} times as many {thing} as {name} "
            f"has now. How many {thing} do they have together?"
        )
        own = first + more
        completion = (
            f"{name} has {first} + {more} = {own} {thing}.\n{other} has {times} * {own} = {times * own} {thing}.\n"
            f"Together they have {own} + {times * own} = {own + times * own} {thing}.\nAnswer: {own + times * own}"
        )
        lines.append(json.dumps({"prompt": prompt, "completion": completion}))
    return "\n".join(lines) + "\n"


def model_folder(work: Path, shape: str, text: Path, *words: str) -> Path:
    """Makes the checkpoint of `shape` with a tokenizer of `text`, once per work folder. `words`: more for make_checkpoint."""
    folder = work / "models" / shape
    if (folder / "made").exists():
        return folder
    say(f"making the {shape} checkpoint")
    script = ROOT / "scripts" / "make_checkpoint.py"
    command = [sys.executable, str(script), "--shape", shape, "--out", str(folder), "--tokenizer-text", str(text), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (folder / "made").touch()
    return folder


def rows_folder(recipe: Path) -> Path:
    """Returns the tokenised rows of a recipe, made now or found. The other side reads them too, so both see the same."""
    loaded = load_recipe(recipe, []).recipe
    return tokenised_rows(loaded, Path(loaded.model.name_or_path)).directory
