"""Tests that a run stops before the step that would pass a limit of its recipe, saved as by Ctrl-C, and says which limit it
was."""

from __future__ import annotations

from typing import Any

import pytest
from drawn import every

from fuyou_cli.core.errors import Interrupted, UsageError
from fuyou_cli.training.length import loaded

from .conftest import NewProject, WholeOf
from .running import STEPS, loaded_run, manifest_of, prepared_run, train
from .test_stopping import RAM

UNCLIPPED = {"train.clip_grad_norm": None}
IN_RAM = {**RAM, **UNCLIPPED, "checkpoint.commit_every_steps": 1}


def test_a_run_ends_before_the_step_that_its_time_does_not_hold(new_project: NewProject, whole: WholeOf) -> None:
    project, heard = new_project(changes={"train.max_steps": STEPS, "train.max_time": "1h30m"}), list[str]()
    with loaded_run(project, announce=heard.append) as run:

        def nearly_over(report: Any) -> None:
            if report.step == 3:
                run._began -= 5400 - 1e-3  # a step of the smallest model takes longer than a millisecond

        with pytest.raises(Interrupted, match=f"stopped after step 3 of {STEPS}: train.max_time=1h30m: ") as ended:
            run.train(nearly_over)
    assert ended.value.exit_code == 130 and "the same command continues from there" in str(ended.value.hint)
    assert heard[-1].startswith("train.max_time=1h30m: ") and "the next step may take" in heard[-1]
    assert max(len(line) for said in heard for line in said.splitlines()) <= 80
    assert manifest_of(project).step == 3
    assert train(project)[0] == whole().losses  # of one process: it begins anew


@pytest.mark.parametrize("changes", every(2, [{}, UNCLIPPED, IN_RAM]), ids=["clipped", "unclipped", "in RAM"])
def test_a_run_never_writes_more_than_its_limit(changes: dict[str, Any], new_project: NewProject, whole: WholeOf) -> None:
    changes = {**changes, "train.max_steps": STEPS}
    project = new_project(changes=changes)
    plan = prepared_run(project).planned.plan
    step = plan.predicted.written_per_step
    project.write_recipe({**changes, "offload.ssd_write_limit": loaded(plan) + step - 1})
    with pytest.raises(
        UsageError, match=r"ssd_write_limit=\d+ is too small: loading the model writes .*, a step( and saving it)? \d"
    ):
        train(project)
    assert not list(project.out.rglob("store.bin"))  # nothing is written for a run that could not get anywhere
    limit = loaded(plan) + int(3.5 * step)
    project.write_recipe({**changes, "offload.ssd_write_limit": limit})
    with pytest.raises(Interrupted, match=rf"stopped after step [23] of {STEPS}: offload.ssd_write_limit=") as ended:
        train(project)
    assert ended.value.exit_code == 130
    saved = manifest_of(project)
    assert limit - 2 * step < saved.written_total <= limit
    # The limit is the whole run's, not a process's. One whose last step also wrote what the step before had left counts on as
    # much again, and its successor may find room for one step more.
    with pytest.raises(Interrupted, match=rf"stopped after step [23] of {STEPS}: offload.ssd_write_limit="):
        train(project)
    again = manifest_of(project)
    assert again == saved or (again.step == saved.step + 1 and again.written_total <= limit)
    project.write_recipe(changes)
    assert train(project)[0] == whole(changes).losses
