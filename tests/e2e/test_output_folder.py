"""Tests what lies in a run's folders, and who else is at it; keys that name a folder, given a file; others' loggers."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from fuyou_cli.cli.finetune import claimed
from fuyou_cli.core.errors import UsageError
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.prepare import run_directories
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.resume import find_saved

from .conftest import NewProject, ended
from .running import train


def test_two_runs_do_not_share_one(new_project: NewProject) -> None:
    """Refuses it also with stores of their own: either run would set the other's log aside, and write its model over."""
    project = new_project()
    with claimed(project.out, say=print):
        with pytest.raises(UsageError, match="another run uses"), claimed(project.out, say=print):
            pass
        refused = project.fuyou("finetune", project.recipe, f"offload.dir={project.folder}/elsewhere")
        assert refused.returncode == 2 and f"error: output_dir: another run uses {project.out}" in refused.stderr
        assert not any(project.out.iterdir()) and not (project.folder / "elsewhere").exists()
    with claimed(project.out, say=print):
        pass


def test_a_run_that_does_not_find_the_earlier_one_says_so(new_project: NewProject) -> None:
    project = new_project(changes={"train.max_steps": 3, "export.at_end": False})
    _, store = train(project)
    (project.out / "log.jsonl").parent.mkdir(exist_ok=True)
    (project.out / "log.jsonl").write_text("{}\n")
    elsewhere = f"offload.dir={project.folder}/elsewhere"
    anew = project.fuyou("finetune", project.recipe, elsewhere)
    said = " ".join(anew.stderr.split())
    assert anew.returncode == 0 and "log.jsonl belongs to an earlier run that has no saved state in" in said
    assert (project.out / "log.jsonl.1").read_text() == "{}\n" and store.is_dir()
    again = project.fuyou("finetune", project.recipe, elsewhere)
    assert again.returncode == 0 and "belongs to an earlier run" not in again.stderr


@pytest.mark.parametrize("name", ["timeline.svg", "log.jsonl"])
def test_what_would_be_waited_for_or_followed_is_refused_first(name: str, new_project: NewProject) -> None:
    """Refuses the drawing too, which is the last thing that a run writes before its export."""
    project = new_project()
    project.out.mkdir()
    os.mkfifo(project.out / name)
    for _ in range(2):
        refused = project.fuyou("finetune", project.recipe)
        assert refused.returncode == 2 and f"{name} is not a regular file" in " ".join(refused.stderr.split())
        (project.out / name).unlink()
        (project.out / name).symlink_to(project.recipe)


# ---- keys that name a folder ---------------------------------------------------------------------------------------------


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
        done = there.done(*words)
        return done.stdout

    recipe = str(project.recipe)
    for _ in range(2):  # the second time it is resumed
        fuyou("finetune", recipe)
    assert json.loads(fuyou("report", "out", "--json"))["planned"]["store"].endswith("here\udcff/" + "store/" + _store(folder))
    fuyou("export", recipe, "whole", "--merged")
    assert (folder / "whole" / "config.json").is_file()


def _store(folder: Path) -> str:
    return next(place.name for place in (folder / "store").iterdir())


# ---- other programs' loggers ---------------------------------------------------------------------------------------------


TRACKIO = """
import json, sys, types
library = types.ModuleType("trackio")
class Run:
    def log(self, values, step):
        with open("told.jsonl", "a") as file:
            file.write(json.dumps({"step": step, **values}) + "\\n")
        if step == 4:
            raise ConnectionError("the server is gone")
    def finish(self):
        pass
def init(**named):
    print("* created a run")
    return Run()
library.init = init
sys.modules["trackio"] = library
"""


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_logger_that_is_missing_is_refused_first(new_project: NewProject) -> None:
    project = new_project(changes={"logging.backends": ["jsonl", "wandb"]})
    done = project.fuyou("finetune", project.recipe)
    assert done.returncode == 2 and 'pip install "fuyou[wandb]"' in done.stderr
    assert not project.out.exists()


def test_a_logger_that_fails_does_not_end_the_run(new_project: NewProject) -> None:
    """The library is a module of a few lines with trackio's calls; it fails in the fourth of six steps."""
    project = new_project(changes={"logging.backends": ["jsonl", "trackio"], "logging.every_steps": 2})
    done = ended(project.begin("finetune", project.recipe, first=TRACKIO))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the logger trackio failed, and the run goes on without it: the server is gone") == 1
    assert "* created a run" in done.stderr and "* created a run" not in done.stdout
    told = [json.loads(line) for line in (project.folder / "told.jsonl").read_text().splitlines()]
    losses = project.losses()
    assert [record["step"] for record in told] == [2, 4] and len(losses) == 6
    assert [record["train/loss"] for record in told] == [losses[2], losses[4]]
