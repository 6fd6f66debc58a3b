"""Tests numbers that are not finite, and parameters that do not move: what a run says, skips and keeps."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawn import every

from fuyou_cli.cli.finetune import run_finetune
from fuyou_cli.core.errors import Interrupted, NumericsError
from fuyou_cli.engine import executor as executors
from fuyou_cli.engine.gradients import GradientSum
from fuyou_cli.planner.schedule import Visit
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.spec.model import StageSpec
from fuyou_cli.training.report import StepReport
from fuyou_cli.training.run import Run
from fuyou_cli.training.run_log import read_log
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.manifest import StoredStage

from .conftest import NewProject, Project, WholeOf
from .running import STEPS, assert_same_exports, loaded_run, manifest_of, store_of, train
from .test_stopping import RAM

SKIP = {"train.max_steps": STEPS, "train.skip_nonfinite": 2}
UNCLIPPED = {"train.max_steps": STEPS, "train.clip_grad_norm": None, "offload.defer_updates": 0}


def _poisoned(
    project: Project,
    steps: set[int],
    *,
    heard: list[str] | None = None,
    on_step: Callable[[StepReport], None] = lambda report: None,
) -> list[float]:
    """The losses of a run whose gradients are NaN in `steps`."""
    announce = [].append if heard is None else heard.append
    with loaded_run(project, announce=announce) as run:
        look = run.executor.between_micro_batches

        def poison() -> None:
            look()
            if run.step + 1 in steps:
                for total in run.executor.visits.sums._sums.values():
                    total.flat.fill_(float("nan"))

        run.executor.between_micro_batches = poison
        run.train(on_step)
        return run.losses


def _first_block(run: Run) -> StageSpec:
    return next(stage for stage in run.model.stages if stage.kind == "block")


def _stop_after(step: int) -> Callable[[StepReport], None]:
    return lambda report: os.kill(os.getpid(), signal.SIGINT) if report.step == step else None


PLACES: dict[str, dict[str, Any]] = {
    "ssd": {},
    "RAM, every second step": {**RAM, "checkpoint.commit_every_steps": 2},
    "emulated device": {"offload.device": "emulated"},
}


@pytest.mark.parametrize("place", every(3, PLACES))
def test_skipped_steps_survive_a_stop(place: str, new_project: NewProject) -> None:
    """Checks that AdamW counts the steps that updated, on both sides of the stop."""
    changes, heard = {**SKIP, **PLACES[place]}, list[str]()
    whole, broken = new_project("whole", changes), new_project("broken", changes)
    expected = _poisoned(whole, {1, 4}, heard=heard)
    assert len(expected) == STEPS and len(heard) == 2
    assert all(said.endswith("the step is skipped and changes nothing (1 in a row, at most 2 are allowed)") for said in heard)
    assert "step 1: " in heard[0] and "gradients of" in heard[0]
    with pytest.raises(Interrupted, match="stopped after step 4"):
        _poisoned(broken, {1, 4}, on_step=_stop_after(4))
    saved = manifest_of(broken)
    assert (saved.step, saved.skipped, saved.skipped_in_row) == (4, 2, 1)
    assert train(broken)[0] == expected
    assert_same_exports(store_of(broken), store_of(whole), broken.folder)


def test_a_skipped_step_keeps_every_bit(new_project: NewProject) -> None:
    project = new_project(changes=SKIP)
    with pytest.raises(Interrupted):
        _poisoned(project, {3}, on_step=_stop_after(3))
    after, before = manifest_of(project), manifests.read(store_of(project), manifests.BEFORE)
    assert before is not None and (before.step, after.step) == (2, 3)
    assert [_sums(stage) for stage in after.stages] == [_sums(stage) for stage in before.stages]


def _sums(stage: StoredStage) -> list[tuple[str, int]]:
    return [(name, extent.sum) for name, extent in stage.extents()]


def test_more_in_a_row_than_may_be_skipped_end_the_run(new_project: NewProject) -> None:
    project, heard = new_project(changes=SKIP), list[str]()
    with pytest.raises(NumericsError, match=r"step 5: \d+ gradients of") as ended:
        _poisoned(project, {3, 4, 5}, heard=heard)
    assert [said.rpartition("nothing ")[2] for said in heard] == [f"({n} in a row, at most 2 are allowed)" for n in (1, 2)]
    assert "train.skip_nonfinite=3 skips such a step and goes on" in str(ended.value.hint)
    assert manifest_of(project).step == 4
    with pytest.raises(NumericsError, match="step 5"):  # the row goes on where the run does
        _poisoned(project, {5})
    project.write_recipe({**SKIP, "train.skip_nonfinite": 3})
    assert len(_poisoned(project, {5})) == STEPS


def test_without_clipping_the_run_is_back_at_its_last_commit(new_project: NewProject, whole: WholeOf) -> None:
    project = new_project(changes=UNCLIPPED)
    with loaded_run(project) as run:
        end, block = run.executor.visits.sums.end, _first_block(run)

        def poison(visit: Visit, stage: int, total: GradientSum | None) -> None:
            if run.step == 3 and total is not None and stage == block.index:
                total.flat.fill_(float("nan"))
            end(visit, stage, total)

        run.executor.visits.sums.end = poison
        with pytest.raises(NumericsError, match=r"step 4: \d+ gradients of transformer\.h\.0") as ended:
            run.train(lambda report: None)
    assert ended.value.changed and manifest_of(project).step == 3
    assert "updates of the step had begun, so the run goes back to its last commit, after step 3" in str(ended.value.hint)
    assert train(project)[0] == whole(UNCLIPPED).losses


def test_a_skipped_step_is_in_the_log(new_project: NewProject, monkeypatch: pytest.MonkeyPatch) -> None:
    project = new_project(changes={**SKIP, "export.at_end": False})
    monkeypatch.setattr("fuyou_cli.core.process.settle_allocator", lambda: None)  # of this process
    monkeypatch.setattr("fuyou_cli.core.process.settle_for_training", lambda: None)
    norm = executors.squared_norm

    def refused(stage: Any, squares: list[float], host: torch.Tensor, **options: Any) -> float:
        if options["step"] == 2:
            host[0] = float("inf")
            squares = [float("inf"), *squares[1:]]
        return norm(stage, squares, host, **options)

    monkeypatch.setattr(executors, "squared_norm", refused)
    run_finetune(load_recipe(project.recipe))
    events = read_log(project.out / "log.jsonl")
    (skipped,) = [event for event in events if event["event"] == "skipped"]
    assert skipped["step"] == 2 and "not finite" in str(skipped["reason"])
    assert [event["grad_norm"] is None for event in events if event["event"] == "step"] == [n == 2 for n in range(1, STEPS + 1)]


def test_a_parameter_that_no_gradient_reaches_is_named_once(new_project: NewProject) -> None:
    project, heard = new_project(changes=UNCLIPPED), list[str]()
    with loaded_run(project, announce=heard.append) as run:
        end, block = run.executor.visits.sums.end, _first_block(run)
        bias = block.tensors[1]

        def forget(visit: Visit, stage: int, total: GradientSum | None) -> None:
            if total is not None and stage == block.index:
                total.flat[bias.offset : bias.offset + bias.numel] = 0
            end(visit, stage, total)

        run.executor.visits.sums.end = forget
        run.train(lambda report: None)
    assert heard == [f"note: {bias.name} got no gradient in 3 steps, so they are not trained"]
