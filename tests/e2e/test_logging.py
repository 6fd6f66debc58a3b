"""Tests other programs' loggers in a real run: refused before anything is written where they are missing, and no run ends by
one."""

from __future__ import annotations

import importlib.util
import json

import pytest

from .conftest import NewProject, ended

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
