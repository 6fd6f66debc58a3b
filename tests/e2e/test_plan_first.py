"""Tests that `fuyou finetune` shows its plan before it fetches and tokenises anything, and again only what has changed
since."""

from __future__ import annotations

from .conftest import NewProject, Project

TOKENISING, PLAN = "reading and tokenising the data", "Placement"


def _said(project: Project) -> str:
    done = project.fuyou("finetune", project.recipe)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stderr.split())


def test_the_plan_comes_before_the_data(new_project: NewProject) -> None:
    said = _said(new_project(changes={"train.max_steps": 2, "export.at_end": False}))
    assert said.count(PLAN) == 1 and said.index(PLAN) < said.index(TOKENISING)
    assert "2 steps in" in said[: said.index(TOKENISING)]


def test_what_the_data_decides_is_said_once_it_is_known(new_project: NewProject) -> None:
    epochs = {"train.max_steps": None, "train.epochs": 1, "train.batch_size": 32, "train.micro_batch_size": 16}
    said = _said(new_project(changes={**epochs, "lr_scheduler.warmup_steps": 0, "export.at_end": False}))
    before, after = said.split(TOKENISING)
    assert PLAN in before and PLAN not in after
    assert "1,000 steps write" in before and "2 steps in" not in before
    assert "2 steps in" in after and "the run's 2 steps write" in after


def test_the_plan_of_a_saved_run_comes_once_nothing_refuses_it(stopped: Project) -> None:
    said = _said(stopped)
    assert said.count(PLAN) == 1 and said.index(TOKENISING) < said.index(PLAN) < said.index("resuming after step")
