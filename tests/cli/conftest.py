"""Runs `fuyou` as a person does: a process of its own, in an empty folder. Lays out /proc and /sys of other machines."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fuyou_cli.cli.app import main

ROOT = Path(__file__).resolve().parents[2]

RECIPE = "output_dir: out\nmodel: {name_or_path: tiny}\ndataset: {train: [{path: rows.jsonl}]}\n"


def environment(**changes: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("FUYOU_", "NO_COLOR"))}
    return {**kept, "PYTHONPATH": str(ROOT), **changes}


def tree(root: Path, files: dict[str, str]) -> Path:
    """Writes these texts under `root`; returns it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def with_drive(folder: Path, files: dict[str, str]) -> Path:
    """Makes a /sys with one drive under the file system of `folder`."""
    device = tree(folder / "sys" / "devices" / "sda", files)
    number = folder.stat().st_dev
    link = folder / "sys" / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(device)
    return folder / "sys"


@pytest.fixture
def fuyou(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs fuyou(*arguments, env...) in tmp_path; output as text. With variables of its own, in a process of its own."""

    def _fuyou(*arguments: str | Path, **changes: str) -> subprocess.CompletedProcess[str]:
        words = [*map(str, arguments)]
        if not changes:
            capsys.readouterr()
            with pytest.raises(SystemExit) as ended:
                main(words)
            said = capsys.readouterr()
            return subprocess.CompletedProcess(words, int(ended.value.code or 0), said.out, said.err)
        command = [sys.executable, "-m", "fuyou_cli", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment(**changes), capture_output=True, text=True, stdin=subprocess.DEVNULL,
            timeout=120, check=False,
        )  # fmt: skip

    monkeypatch.chdir(tmp_path)
    for name in {*os.environ} - {*environment()}:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    return _fuyou


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path
