"""Writes a first recipe from four answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from ..core.errors import UsageError
from ..core.printable import one_line
from .load import load_recipe

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


def _text(target: Path, model: str, data: str, memory: str, directory: str | None) -> str:
    name = re.sub(r"[^\w.-]+", "-", Path(model).name).strip(".-") or "model"
    place = _HERE if directory is None else f"  dir: {_quoted(directory)}\n"
    return _TEMPLATE.format(
        file=one_line(target.name), output=_quoted(f"outputs/{name}"), model=_quoted(model), data=_quoted(data),
        memory=_quoted(memory), place=place,
    )  # fmt: skip


def _quoted(text: str) -> str:
    """Formats text as YAML: plain if that reads back as the same text, otherwise as JSON, which is valid YAML."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{text}: the name is not UTF-8, so a recipe cannot hold it", hint="rename it") from None
    is_plain = re.fullmatch(r"[A-Za-z][\w./-]*", text) is not None and yaml.safe_load(text) == text
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def write_first_recipe(target: Path, model: str, data: str, memory: str, directory: str | None) -> None:
    """Writes a recipe. Raises UsageError if it cannot be written, RecipeErrors if an answer is not valid; then no file is
    left."""
    text = _text(target, model, data, memory, directory)
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
