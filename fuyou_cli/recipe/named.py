"""Finds the recipe that a command names, a file or a shipped one, and writes a first one from four answers."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ..core.errors import UsageError
from ..core.json_files import one_line, printable
from .load import LoadedRecipe, load_recipe

DEFAULT = Path("recipe.yaml")
_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_recipes() -> dict[str, Path]:
    """Lists them as name -> file, sorted by name. Empty if the installation has none."""
    return _named(Path())


def shipped_hardware() -> dict[str, Path]:
    """Finds the lists of parts that describe a machine: name (gpus, drives, hosts) -> file."""
    return _named(Path("hardware"))


def shipped_shapes(model: str) -> dict[str, Any] | None:
    """Returns what config.json says of the shapes of a model of the hub that a shipped recipe names; None of any other."""
    file = _named(Path("models")).get("shapes")
    shapes = None if file is None else yaml.safe_load(file.read_text(encoding="utf-8")).get(model)
    return None if shapes is None else dict(shapes)


def _named(inside: Path) -> dict[str, Path]:
    for folder in (_PACKAGE / "recipes", _PACKAGE / "shipped_recipes", _PACKAGE.parent / "recipes"):
        if folder.is_dir():
            return {path.stem: path for path in sorted((folder / inside).glob("*.yaml"))}
    return {}


def summary(path: Path) -> str:
    """Returns the first comment line of a shipped recipe, which says what it is for."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            return line.removeprefix("# ").strip()
    return ""


def find_recipe(recipe: str | None, overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """Returns the file and the overrides. `fuyou plan a.b=1` changes ./recipe.yaml; `quickstart` is a shipped recipe. Raises
    UsageError that lists the shipped recipes if there is no such file."""
    texts = list(overrides)
    if recipe is not None and "=" in recipe and not Path(recipe).exists():
        texts.insert(0, recipe)
        recipe = None
    if recipe is None:
        if not DEFAULT.exists():
            raise UsageError(f"no recipe given, and ./{DEFAULT} does not exist", hint=_offer())
        return DEFAULT, texts
    path = Path(recipe)
    if path.exists() or path.is_symlink():
        return path, texts
    shipped = shipped_recipes()
    if path.name == recipe and path.name.removesuffix(".yaml") in shipped:
        return shipped[path.name.removesuffix(".yaml")], texts
    raise UsageError(f"there is no file {recipe!r}, nor a shipped recipe of this name", hint=_offer(recipe))


def refuse_unmade(loaded: LoadedRecipe) -> None:
    """Raises UsageError if the quickstart's recipe is used before the quickstart has made its model. Otherwise the hub would
    be asked for a model of that name."""
    if loaded.path != shipped_recipes().get("quickstart"):
        return
    model = Path(loaded.recipe.model.name_or_path)
    if model == Path("outputs/quickstart/model") and not model.exists():
        raise UsageError(f"{model} does not exist yet", hint="run `fuyou quickstart` first: it makes the model and its text")


def _offer(recipe: str = "") -> str:
    near = difflib.get_close_matches(Path(recipe).stem, list(shipped_recipes()), n=1) if recipe else []
    first = f"did you mean `{near[0]}`? Shipped recipes:" if near else "name one of the shipped recipes:"
    return "\n".join([first, *(f"    {line}" for line in listed())])


def listed() -> list[str]:
    """Returns a line for each shipped recipe."""
    shipped = shipped_recipes()
    width = max(map(len, shipped), default=0)
    return [f"{name:<{width}}  {summary(path)}" for name, path in shipped.items()]


def config_text(loaded: LoadedRecipe) -> str:
    """Formats every key with its value, defaults included, as a recipe that loads again. YAML itself spells unprintable
    characters."""

    def text(*, unicode: bool) -> str:
        values = loaded.recipe.model_dump(mode="json")
        return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=unicode, default_flow_style=False)).rstrip("\n")

    shown = text(unicode=True)
    return shown if printable(shown) == shown else text(unicode=False)


def shipped_file(name: str) -> Path:
    """Finds a shipped recipe by its name. Raises UsageError."""
    path = shipped_recipes().get(name.removesuffix(".yaml"))
    if path is None:
        raise UsageError(f"no such shipped recipe: {name!r}", hint=_offer(name))
    return path


# ---- a first recipe --------------------------------------------------------------------------------------------------


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
    name = re.sub(r"[^\w.-]+", "-", Path(model).name).strip(".-") or "model"
    text = _TEMPLATE.format(
        file=one_line(target.name), output=_quoted(f"outputs/{name}"), model=_quoted(model), data=_quoted(data),
        memory=_quoted(memory), place=_HERE if directory is None else f"  dir: {_quoted(directory)}\n",
    )  # fmt: skip
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
