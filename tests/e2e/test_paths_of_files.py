"""Tests keys that name a folder, given a file: refused with the key, and nothing else is blamed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from fuyou_cli.core.errors import UsageError
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.prepare import run_directories
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.resume import find_saved

from .conftest import NewProject


@pytest.mark.parametrize("key", ["offload.dir", "output_dir"])
def test_a_store_is_not_put_below_a_file(key: str, new_project: NewProject, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    recipe = load_recipe(new_project(changes={key: str(file)}).recipe).recipe
    with pytest.raises(UsageError, match=f"^{key}: .*{file} is a file, not a folder"):
        run_directories(recipe)


def test_a_run_is_not_resumed_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    file.write_text("{}")
    with pytest.raises(UsageError, match=f"^checkpoint.resume: {file}: {file} is a file"):
        find_saved(str(file), [tmp_path], say=print)
    with pytest.raises(UsageError, match="it is a file"):
        manifests.read(file)


def test_a_refusal_is_two_lines_and_exit_code_2(new_project: NewProject, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    done = new_project().fuyou("plan", "recipe.yaml", f"offload.dir={tmp_path / 'file'}")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: offload.dir: {tmp_path / 'file'}: {tmp_path / 'file'} is a file, not a folder",
        "  help: name a folder, or a new one",
    ]


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("plan", "recipe.yaml", "offload.dir=~nosuchuser/x"), "offload.dir"),
        (("export", "recipe.yaml", "out", "checkpoint.resume=~nosuchuser/x"), "checkpoint.resume"),
        (("quickstart", "output_dir=~nosuchuser/x"), "output_dir"),
    ],
)
def test_a_home_that_is_not_there_is_no_bug(arguments: tuple[str, ...], key: str, new_project: NewProject) -> None:
    done = new_project().fuyou(*arguments)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == f"error: {key}: ~nosuchuser/x: Could not determine home directory."


def test_a_current_folder_whose_name_is_not_utf8(new_project: NewProject, llama: Path) -> None:
    """Every path that a run writes down has it: manifest, log, summary of the data, the adapter's configuration."""
    adapter = {"adapter": {"r": 4}, "dataset.cache_dir": "rows", "train.max_steps": 2, "model.name_or_path": "llama"}
    project = new_project(changes={"output_dir": "out", "offload.dir": "store", **adapter})
    folder = project.folder / os.fsdecode(b"here\xff")
    folder.mkdir()
    (folder / "llama").symlink_to(llama)
    there = replace(project, folder=folder)

    def fuyou(*words: str) -> str:
        done = there.fuyou(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    recipe = str(project.recipe)
    for _ in range(2):  # the second time it is resumed
        fuyou("finetune", recipe)
    assert json.loads(fuyou("report", "out", "--json"))["planned"]["store"].endswith("here\udcff/" + "store/" + _store(folder))
    fuyou("export", recipe, "whole", "--merged")
    assert (folder / "whole" / "config.json").is_file()


def _store(folder: Path) -> str:
    return next(place.name for place in (folder / "store").iterdir())
