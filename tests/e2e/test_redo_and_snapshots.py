"""Tests stores that keep every state once and do updates again, and stores of snapshots: what a death or a damage leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drawn import every

from fuyou_cli.core.errors import Interrupted, SwapError, UsageError
from fuyou_cli.training.run import Run
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.stored import Manifest
from tests.damage import flip

from .conftest import Project, Whole
from .running import STEPS, exported, interrupt, manifest_of, prepared_run, run_of, store_of, train
from .test_every_step_committed import Died, NewProject, _dies_at


def test_a_saved_run_keeps_its_kind_of_store(stopped: Project) -> None:
    for changes in ({"checkpoint.mode": "redo"}, {"checkpoint.mode": "snapshot", "checkpoint.snapshot_every_steps": 3}):
        stopped.write_recipe({"train.max_steps": STEPS, **changes})
        with pytest.raises(UsageError, match=r"checkpoint\.mode: the saved run uses in_place, not"):
            prepared_run(stopped)


def test_a_saved_redo_store_says_why_no_norm_is_measured_first(new_project: NewProject) -> None:
    project = new_project("redo", {"checkpoint.mode": "redo"})
    with pytest.raises(Interrupted):
        train(project, interrupt(2, "forward"))
    project.write_recipe({"offload.norm_first": "always", "offload.gradients": "auto"})
    with pytest.raises(UsageError, match=r"offload\.norm_first: .* cannot measure the norm first") as caught:
        prepared_run(project)
    assert "the saved run's store is of checkpoint.mode redo" in str(caught.value.hint)


EVERY_SECOND = {"checkpoint.snapshot_every_steps": 2}
KEEPING_FOUR = {"checkpoint.snapshot_every_steps": 1, "checkpoint.keep_last": 4}


@pytest.mark.parametrize(
    ("changes", "kept", "damaged"), [(EVERY_SECOND, [4, 2], 1), (EVERY_SECOND, [4, 2], 2), (KEEPING_FOUR, [5, 4, 3, 2], 3)]
)
def test_the_last_snapshots_can_be_gone_back_to(
    changes: dict[str, int], kept: list[int], damaged: int, new_project: NewProject, whole: Callable[..., Whole]
) -> None:
    """Goes on with the newest that is whole. Two are kept where nobody says how many; with both damaged nothing goes on."""
    snapshots = {"checkpoint.mode": "snapshot", "train.max_steps": STEPS, **changes}
    expected = whole(snapshots).losses
    project = new_project("broken", snapshots)
    with pytest.raises(Died):
        train(project, _dies_at(6, 5))
    newest = manifest_of(project)
    found = [newest, *manifests.before(store_of(project), newest)]
    assert [state.step for state in found] == kept and newest.keep == len(kept)
    for state in found[:damaged]:
        extent = state.stages[1].momentum
        assert extent is not None
        flip(Path(state.files[0]), extent.offset + 17)
    with run_of(project) as run:
        if damaged == len(kept):
            with pytest.raises(SwapError, match="no older one is whole"):
                run.load(lambda count: None)
            return
        run.load(lambda count: None)
        assert run.step == kept[damaged]
        run.train(lambda report: None)
        assert run.losses == expected


def _dies_amid_updates(*, partly: bool) -> Callable[[Run], None]:
    """Where the run would commit what follows a manifest that names gradients, that one being durable; with `partly` one that
    names some stages by them and the others updated. A wait for the manifest puts the death there whatever the speed of disk
    and threads. Every step has such manifests where stages outnumber the spare places of their ring: the update that finds
    none free waits for a manifest that names the one before it."""
    found: list[Manifest] = []

    def look(run: Run) -> None:
        commits = run.saver.commits
        if "begin" in vars(commits):
            return
        begin = commits.begin

        def begin_or_die(manifest: Manifest) -> None:
            if found:
                commits.finish()
                raise Died
            begin(manifest)
            pending = _pending(manifest)
            if any(pending) and not (partly and all(pending)):
                found.append(manifest)

        commits.begin = begin_or_die  # type: ignore[method-assign]

    return look


def _pending(manifest: Manifest) -> list[bool]:
    """Returns of every stage that has parameters whether it is named by its gradients."""
    return [stage.gradients is not None for stage in manifest.stages if stage.params]


def test_redo_has_everything_once(new_project: NewProject, whole: Callable[..., Whole]) -> None:
    """The store's durable part; and a step dies with some of its stages updated, the others by their gradients."""
    twice, once = (new_project(mode, {"checkpoint.mode": mode}) for mode in ("in_place", "redo"))
    plans = [prepared_run(project).planned.plan for project in (twice, once)]
    sizes = []
    for plan in plans:
        rings = {stage.ring.offset: stage.ring for stage in plan.stages}.values()
        sizes.append(sum((ring.stages + ring.spares) * ring.size for ring in rings))
    assert sizes[1] < sizes[0]
    assert any(ring.stages > ring.spares for ring in rings)  # see _dies_amid_updates
    expected = whole().losses
    for partly in (False, True, True, False):
        with pytest.raises(Died):
            train(once, _dies_amid_updates(partly=partly))
        pending = _pending(manifest_of(once))
        assert any(pending) and not (partly and all(pending))
    assert train(once)[0] == expected


@pytest.mark.parametrize(
    ("dtype", "states"),
    every(
        2,
        [("bfloat16", "float32"), ("float32", "float32"), ("bfloat16", "int8"), ("float32", "bfloat16"), ("bfloat16", "lion")],
    ),
)
def test_an_export_has_the_updates_that_are_to_be_done(
    dtype: str, states: str, new_project: NewProject, tmp_path: Path
) -> None:
    """Kills between a step's gradients and its updates, and exports; then goes on, stops, and exports again."""
    redo = {"checkpoint.mode": "redo", "train.max_steps": STEPS}
    optimizer = {"optimizer.name": "lion"} if states == "lion" else {"optimizer.state_dtype": states}
    project = new_project("redo", {**redo, "precision.compute": dtype, **optimizer})
    with pytest.raises(Died):
        train(project, _dies_amid_updates(partly=False))
    saved = manifest_of(project)
    assert saved.due is not None
    before = exported(store_of(project), tmp_path / "before")
    with pytest.raises(Interrupted):
        train(project, interrupt(saved.step + 1, "forward"))
    after = manifest_of(project)
    assert (after.step, after.due) == (saved.step, None)
    ours = exported(store_of(project), tmp_path / "after")
    assert ours.keys() == before.keys() and all(torch.equal(ours[name], before[name]) for name in ours)
    changed = [stage.name for stage, now in zip(saved.stages, after.stages, strict=True) if stage.generation != now.generation]
    assert changed
