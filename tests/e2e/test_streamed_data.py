"""Runs whose data is tokenised while they train."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuyou_cli.core.errors import DataError, DataSpaceError
from fuyou_cli.data.stream import Stream
from fuyou_cli.recipe.load import load_recipe

from .conftest import NewProject
from .running import STEPS, interrupt, manifest_of, planned, stop, store_of, train

STREAMED = {"dataset.streaming": True, "train.max_steps": STEPS}


def test_losses_are_those_of_data_tokenised_before(new_project: NewProject, whole: Callable[..., Any]) -> None:
    before = whole({"dataset.shuffle": False})
    said: list[str] = []
    losses, _ = train(new_project("streamed", {**STREAMED, "dataset.shuffle": False}), say=said.append)
    assert losses == before.losses


def test_a_stopped_run_goes_on_with_the_same_rows(new_project: NewProject) -> None:
    changes = {**STREAMED, "dataset.packing": "concat"}
    losses, _ = train(new_project("whole", changes))
    stopped = new_project("stopped", changes)
    stop(stopped, interrupt(3, "forward"))
    assert train(stopped)[0] == losses


def test_as_a_person_runs_it(new_project: NewProject) -> None:
    project = new_project("command", STREAMED)
    done = project.done("finetune", project.recipe)
    assert "the first part of the data: 64 samples (rows.jsonl: text) in 64 rows" in " ".join(done.stderr.split())
    shown = project.fuyou("data", project.recipe)
    assert shown.returncode == 0 and "6 of 4 rows, typically" in shown.stdout and ": of a stream" in shown.stdout, shown.stderr
    without = project.fuyou("finetune", project.recipe, "train.max_steps=null", "train.epochs=1")
    assert without.returncode == 2 and "set train.max_steps" in without.stderr


def test_a_full_disk_and_a_bad_row_late_in_the_data_cost_no_step(
    new_project: NewProject, materials: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves what was trained before, and the hints do not send a person in a circle."""
    assert Stream.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(Stream.__init__.__kwdefaults__, "part_tokens", 100)
    data = tmp_path / "late.jsonl"
    data.write_text((materials / "rows.jsonl").read_text() * 5 + '{"text": 5}\n')
    changes = {
        "dataset.train": [{"path": str(data)}],
        "train.batch_size": 32,
        "train.micro_batch_size": 32,
        "train.max_steps": 30,
    }
    project = new_project("late", {**STREAMED, **changes})
    with pytest.raises(DataSpaceError, match="no room for data in ") as full, monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", _once(Path.mkdir, "rows"))
        train(project)
    assert manifest_of(project).step == 8  # the rows of the first part
    assert f"the state after step 8 is saved in {store_of(project)}: the same command" in str(full.value.hint)
    with pytest.raises(DataError, match=r"late\.jsonl:321: the column text is of type int") as caught:
        train(project)
    assert manifest_of(project).step == 8
    hint = str(caught.value.hint)
    assert f"the state after step 8 is saved: fuyou export {store_of(project)} OUT" in hint
    assert (
        "with other data a run starts over: checkpoint.resume=never, and model.name_or_path=OUT" in hint
        and "the same command" not in hint
    )


def _once(mkdir: Callable[..., None], name: str) -> Callable[..., None]:
    """Makes one folder of this name. Then the disk is full."""
    made: list[Path] = []

    def made_once(folder: Path, *arguments: Any, **options: Any) -> None:
        if folder.name == name and made:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        made.extend([folder] * (folder.name == name))
        mkdir(folder, *arguments, **options)

    return made_once


def test_a_plan_counts_the_process_that_tokenises(new_project: NewProject) -> None:
    alone, beside = (
        planned(load_recipe(new_project(name, changes).recipe).recipe)
        for name, changes in (("alone", {}), ("beside", STREAMED))
    )
    assert beside.plan.predicted.cpu_peak - alone.plan.predicted.cpu_peak == Stream.peak_bytes
