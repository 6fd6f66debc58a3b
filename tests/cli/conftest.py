"""Runs `fuyou` as a person does: a process of its own, in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

RECIPE = "output_dir: out\nmodel: {name_or_path: tiny}\ndataset: {train: [{path: rows.jsonl}]}\n"


def environment(**changes: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("FUYOU_", "NO_COLOR"))}
    return {**kept, "PYTHONPATH": str(ROOT), **changes}


@pytest.fixture
def fuyou(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs fuyou(*arguments, env...) in tmp_path; output as text."""

    def _fuyou(*arguments: str | Path, **changes: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fuyou_cli", *map(str, arguments)]
        return subprocess.run(
            command, cwd=tmp_path, env=environment(**changes), capture_output=True, text=True, stdin=subprocess.DEVNULL,
            timeout=120, check=False,
        )  # fmt: skip

    return _fuyou


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path
