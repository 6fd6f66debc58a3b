"""The weights of the lowest evaluation loss: those that an export after that step gives, whatever ends the run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.evaluation import kept_step
from fuyou_cli.training.prepare import best_copies, best_folder
from fuyou_cli.training.report import BestReport
from fuyou_cli.training.run_log import read_history

from .conftest import NewProject, Project
from .running import exported, loaded_run, train

STEPS = 4
KILLED = """
import os, signal
from fuyou_cli.checkpoint.writer import PartialDirectory
from fuyou_cli.training.state.at_rest import saved_store
publish, seen = PartialDirectory.publish, []
def killed(self):
    seen.append(self)
    if len(seen) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    publish(self)
PartialDirectory.publish = killed
"""
ASKED = {
    "train.max_steps": STEPS, "precision.compute": "float32", "optimizer.lr": 0.05, "dataset.eval_fraction": 0.2,
    "lr_scheduler": {"name": "constant"}, "eval": {"every_steps": 1, "keep_best": True},
}  # fmt: skip


def best(project: Project) -> dict[str, torch.Tensor]:
    return {name: value for file in (project.out / "best").glob("*.safetensors") for name, value in load_file(file).items()}


def losses(project: Project) -> dict[int, float]:
    records = [json.loads(line) for line in (project.out / "log.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record["event"] == "eval"}


def after(new_project: NewProject, step: int, target: Path, changes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights that a run of so many steps ends with."""
    project = new_project(f"{step}-steps", {**changes, "train.max_steps": step, "eval": {}})
    return exported(train(project)[1], target)


def test_killed_while_it_is_written(new_project: NewProject, tmp_path: Path) -> None:
    """The copy before stays whole, and the run goes on from its last commit; then the copy is that of the lowest loss."""
    project = new_project(changes=ASKED)
    assert project.begin("finetune", project.recipe, first=KILLED).wait().code == -9
    assert (project.out / ".best.partial").is_dir()
    first = kept_step(project.out / "best")
    assert first is not None and 0 < first < STEPS
    assert all(bool(value.isfinite().all()) for value in best(project).values())
    result = project.done("finetune", project.recipe)
    seen = losses(project)
    lowest = min(range(1, STEPS + 1), key=seen.__getitem__)
    assert kept_step(project.out / "best") == lowest > first and seen[lowest] < seen[0]
    assert not (project.out / ".best.partial").exists()
    expected = after(new_project, lowest, tmp_path / "lowest", ASKED)
    assert all(torch.equal(expected[name], value) for name, value in best(project).items())
    folder = project.out / "best"
    said = f"the lowest loss, {seen[lowest]:.4f}, was after step {lowest}: kept in {folder}"
    assert "".join(said.split()) in "".join(result.stderr.split())  # a long path is cut anywhere
    kept = read_history(project.out / "log.jsonl").best
    assert kept is not None and (kept.step, kept.loss) == (lowest, seen[lowest])


@pytest.mark.parametrize(
    "changes",
    [
        {"adapter": {"r": 4}, "optimizer.lr": 0.01},
        pytest.param(
            {"train.head_chunk_vocab": 128, "offload.device": "emulated", "train.clip_grad_norm": None}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
@pytest.mark.slow
def test_an_adapter_and_a_cut_vocabulary(changes: dict[str, Any], new_project: NewProject, llama: Path, tmp_path: Path) -> None:
    changes = {**ASKED, "model.name_or_path": str(llama), "eval": {"every_steps": 2, "keep_best": True}, **changes}
    project, reports = new_project(changes=changes), list[Any]()
    with loaded_run(project) as run:
        run.train(lambda report: None, reports.append)
        told, stored = run.report().best, dict(run.ready.stored_as)
    step = kept_step(project.out / "best")
    assert step is not None and f"after step {step}: kept in" in told
    plain = new_project("plain", {**changes, "train.max_steps": step, "eval": {}})
    _, store = train(plain)
    if "adapter" in changes:
        from fuyou_cli.training.exporting import stored_weights
        from fuyou_cli.training.state.at_rest import saved_store

        with stored_weights(saved_store(store), dtype="float32", say=None) as weights:
            expected = {
                one.name: bytes(weights.read(one, 0, one.numel)) for one in weights.tensors() if weights.is_trained(one)
            }
        kept = {name: value.numpy().tobytes() for name, value in best(project).items()}
        assert kept == expected and len(kept) < len(stored)
        assert (project.out / "best" / "adapter_config.json").is_file()
        return
    expected_model = exported(store, tmp_path / "model")
    kept_model = best(project)
    assert kept_model.keys() == expected_model.keys()
    assert all(torch.equal(expected_model[name], value) for name, value in kept_model.items())


def test_a_copy_that_cannot_be_written_ends_no_run(new_project: NewProject) -> None:
    """It is said, the copy before stays, which is said too, and training does not notice."""
    project, found = new_project(changes={**ASKED, "train.max_steps": 3}), list[Any]()

    def disturb(report: Any) -> None:
        if report.step == 2:
            (project.out / "best" / "mine.txt").touch()

    with loaded_run(project) as run:
        run.train(disturb, found.append)
        told, ours = run.report().best, run.losses
    kept = [report for report in found if isinstance(report, BestReport)]
    assert [(one.step, "did not write: 'mine.txt'" in one.problem) for one in kept] == [(1, False), (2, True), (3, True)]
    older = f"; those after step 1 are still in {project.out / 'best'}"
    assert kept[1].problem.endswith(older) and kept[2].problem.endswith(older)
    assert kept_step(project.out / "best") == 1 and told.endswith(f"its weights were not kept{older}")
    assert ours == train(new_project("plain", {**ASKED, "train.max_steps": 3, "eval": {}}))[0]


def told(project: Project, say: Callable[[str], None] = lambda text: None) -> str:
    """Returns what a run says of its best weights at its end."""
    with loaded_run(project, announce=say) as run:
        run.train(lambda report: None)
        return run.report().best


def test_copies_are_counted_where_they_are_written(new_project: NewProject) -> None:
    """Counts one copy once it is there, beside `best` where the run starts from that folder."""
    project = new_project(changes=ASKED)
    shutil.copytree(project.materials / "model", project.out / "best")
    recipe = load_recipe(project.recipe, (f"model.name_or_path={project.out / 'best'}",)).recipe
    assert best_copies(recipe) == 2
    best_folder(recipe, project.out / "best").mkdir()
    assert best_copies(recipe) == 1


WORSE = {**ASKED, "optimizer.lr": 5.0, "eval": {"every_steps": 3, "keep_best": True}}


def test_a_run_that_only_gets_worse_keeps_nothing(new_project: NewProject) -> None:
    project = new_project(changes=WORSE)
    assert "was after step 0, before training: no weights are kept" in told(project)
    assert not (project.out / "best").exists()


def test_the_copy_of_a_former_run_is_not_called_kept(new_project: NewProject) -> None:
    """Says whose the copies are not, from start to end, even where a new run's best step is the same."""
    project, said = new_project(changes={**ASKED, "train.max_steps": 1}), list[str]()
    folder = project.out / "best"
    assert f"after step 1: kept in {folder}" in told(project) and kept_step(folder) == 1
    anew = {"checkpoint": {"resume": "never"}, "train.max_steps": 1}
    project.write_recipe({**WORSE, **anew})
    assert told(project, said.append).endswith(f"before training: no weights are kept; {folder} is not of this run")
    assert said.count(f"note: {folder} is not of this run, until this run keeps its best weights there") == 1
    project.write_recipe({**ASKED, **anew})
    (folder / "mine.txt").touch()  # so that nothing takes its place
    assert told(project).endswith(f"after step 1: its weights were not kept; {folder} is not of this run")
    (folder / "mine.txt").unlink()
    assert f"after step 1: kept in {folder}" in told(project)


def test_min_delta_has_no_say_in_which_weights_are_kept(new_project: NewProject) -> None:
    """They are those of the lowest loss; patience alone asks for more."""
    stopping = {"patience": STEPS + 1, "min_delta": 100.0}
    project = new_project(changes={**ASKED, "train.early_stopping": stopping})
    step = kept_step(project.out / "best") if f"kept in {project.out / 'best'}" in told(project) else None
    plain = new_project("plain", ASKED)
    assert told(plain) and step == kept_step(plain.out / "best") and step is not None
