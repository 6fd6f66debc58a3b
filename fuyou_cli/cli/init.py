"""Runs `fuyou init`: asks three questions and writes a recipe that validates."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from fuyou_cli.core.errors import UsageError

from .console import asked, write_status

_TEMPLATE = """# What to train, on what, and where. All keys: fuyou validate {file} --show-config
output_dir: {output}

model:
  name_or_path: {model}  # a folder, or a hub id

dataset:
  train:
    - path: {data}  # its format is seen by its columns
  max_seq_len: 2048  # tokens of a row; longer ones are cut

train:
  epochs: 1
  batch_size: 32  # rows of one optimizer step; how many are computed at once is chosen

optimizer:
  lr: 1e-5

offload:
  max_memory: {{cpu: {memory}}}
{place}"""
_HERE = "  # dir: /mnt/nvme/fuyou  # a folder on the fastest drive; else beside the results\n"


def run_init(target: Path, *, model: str | None, data: str | None, memory: str | None, directory: str | None) -> None:
    """Writes a recipe from the answers and options. Raises UsageError if the file exists, RecipeErrors if an answer is not
    valid; then no file is left."""
    if target.is_dir():
        target = target / "recipe.yaml"
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target} already exists", hint="name another file: fuyou init FILE")
    model, data, memory, directory = _answers(model, data, memory, directory)
    _write(target, _text(target, model, data, memory, directory))
    if not Path(data).expanduser().exists():
        write_status(f"note: {data} does not exist yet")
    write_status(f"wrote {target}. Next: fuyou plan {target}")


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


def _text(target: Path, model: str, data: str, memory: str, directory: str | None) -> str:
    name = re.sub(r"[^\w.-]+", "-", Path(model).name).strip(".-") or "model"
    place = _HERE if directory is None else f"  dir: {_quoted(directory)}\n"
    return _TEMPLATE.format(
        file=target.name, output=_quoted(f"outputs/{name}"), model=_quoted(model), data=_quoted(data), memory=_quoted(memory),
        place=place,
    )  # fmt: skip


def _quoted(text: str) -> str:
    """Formats text as YAML: plain if that reads back as the same text, otherwise as JSON, which is valid YAML."""
    is_plain = re.fullmatch(r"[A-Za-z][\w./-]*", text) is not None and yaml.safe_load(text) == text
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def _write(target: Path, text: str) -> None:
    from fuyou_cli.recipe.load import load_recipe

    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from None
    try:
        load_recipe(target)
    except BaseException:
        target.unlink()
        raise
