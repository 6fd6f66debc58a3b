"""Runs whose data is tokenised while they train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fuyou_cli.core.errors import Interrupted

from .conftest import Project
from .running import STEPS, interrupt, train

STREAMED = {"dataset.streaming": True, "train.max_steps": STEPS}


def test_losses_are_those_of_data_tokenised_before(new_project: Callable[..., Project], whole: Callable[..., Any]) -> None:
    before = whole({"dataset.shuffle": False})
    said: list[str] = []
    losses, _ = train(new_project("streamed", {**STREAMED, "dataset.shuffle": False}), say=said.append)
    assert losses == before.losses


def test_a_stopped_run_goes_on_with_the_same_rows(new_project: Callable[..., Project]) -> None:
    changes = {**STREAMED, "dataset.packing": "concat"}
    losses, _ = train(new_project("whole", changes))
    stopped = new_project("stopped", changes)
    with pytest.raises(Interrupted):
        train(stopped, interrupt(3, "forward"))
    assert train(stopped)[0] == losses


def test_as_a_person_runs_it(new_project: Callable[..., Project]) -> None:
    project = new_project("command", STREAMED)
    done = project.fuyou("finetune", project.recipe)
    assert done.returncode == 0, done.stderr
    assert "the first part of the data: 64 samples (rows.jsonl: text) in 64 rows" in " ".join(done.stderr.split())
    shown = project.fuyou("data", project.recipe)
    assert shown.returncode == 0 and "6 of 4 rows: of a stream" in shown.stdout, shown.stderr
    without = project.fuyou("finetune", project.recipe, "train.max_steps=null", "train.epochs=1")
    assert without.returncode == 2 and "set train.max_steps" in without.stderr
