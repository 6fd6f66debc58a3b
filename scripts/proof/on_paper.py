"""Makes recipes of models that are only configurations, for plans on machines that are only described."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from fuyou_cli.recipe.load import LoadedRecipe, load_recipe

from .verdicts import ROOT

_CONFIGS = ROOT / "tests" / "engine" / "configs"


def known_config(name: str) -> dict[str, Any]:
    """Returns a model's configuration as it is on the hub."""
    found: dict[str, Any] = json.loads((_CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return found


@contextmanager
def recipe_of(
    config: Mapping[str, Any], *, length: int, train: Mapping[str, Any], overrides: Sequence[str] = (), **sections: Any
) -> Iterator[LoadedRecipe]:
    """Writes the recipe of such a model. It has no data, and planning would warn of that. It is removed with the context."""
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO()):
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        dataset = {"train": [{"path": f"{folder}/none.jsonl"}], "max_seq_len": length}
        recipe = {"output_dir": f"{folder}/out", "model": {"name_or_path": folder}, "dataset": dataset, "train": dict(train)}
        path = Path(folder, "recipe.yaml")
        path.write_text(yaml.safe_dump({"version": 1, **recipe, **sections}), encoding="utf-8")
        yield load_recipe(path, overrides)
