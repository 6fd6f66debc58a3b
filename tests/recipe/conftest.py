"""Makes a small valid recipe as text, and loads variations of it from a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fuyou_cli.core.json_files import show_path
from fuyou_cli.recipe.diagnostics import Diagnostic, RecipeErrors
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.recipe.schema import Recipe

VALID = """\
output_dir: out
model:
  name_or_path: tiny
dataset:
  train:
    - path: rows.jsonl
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def _write(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return _write


@pytest.fixture
def load(write: Callable[[str], Path]) -> Callable[..., Recipe]:
    """The recipe of VALID, then `text`, then overrides."""

    def _load(text: str = "", *overrides: str) -> Recipe:
        return load_recipe(write(VALID + text), overrides).recipe

    return _load


@pytest.fixture
def errors(write: Callable[[str], Path]) -> Callable[..., RecipeErrors]:
    """Returns the errors of VALID, then `text`, then overrides."""

    def _errors(text: str = "", *overrides: str) -> RecipeErrors:
        with pytest.raises(RecipeErrors) as caught:
            load_recipe(write(VALID + text), overrides)
        assert caught.value.exit_code == 2
        return caught.value

    return _errors


@pytest.fixture
def refused(errors: Callable[..., RecipeErrors]) -> Callable[..., dict[str, Diagnostic]]:
    """Returns the same by key, or by code where no key is concerned."""

    def _refused(text: str = "", *overrides: str) -> dict[str, Diagnostic]:
        return {show_path(found.path) or found.code: found for found in errors(text, *overrides).diagnostics}

    return _refused
