"""Every step is committed: a run that dies anywhere goes on from the last commit, and nobody can tell it from one that did
not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from drawn import every

from fuyou_cli.core.errors import Interrupted, SwapError
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.training.run import Run
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.manifest import TENSORS, Manifest
from fuyou_cli.training.state.saver import Commits
from fuyou_cli.training.state.store_folders import LOSSES
from tests.damage import flip

from .conftest import NewProject, Project, WholeOf
from .running import STEPS, assert_same_exports, interrupt, loaded_run, manifest_of, prepared_run, run_of, store_of, sums, train
from .test_stopping import RAM

TRAINED = [name for name in TENSORS if name != "frozen"]  # nothing is frozen in these runs
UNCLIPPED = {"train.clip_grad_norm": None}
# Gradients and boundaries on the ssd: what steps write is enough for commits of all that rests in RAM to be a part of it.
AUTO = {
    "offload.weights": "cpu",
    "offload.optimizer_states": "cpu",
    "offload.gradients": "ssd",
    "offload.boundaries": "ssd",
    "train.batch_size": 48,
    "train.micro_batch_size": 8,
}
THERE = {
    "offload.device": "emulated",
    "offload.weights": "gpu",
    "offload.optimizer_states": "gpu",
    "offload.gradients": "gpu",
}
PLACES: dict[str, dict[str, Any]] = {
    "clipped": {},
    "all deferred": {**UNCLIPPED, "offload.defer_updates": 1},
    "every third step": {"checkpoint.commit_every_steps": 3},
    "every second step, in RAM": {**RAM, **UNCLIPPED, "checkpoint.commit_every_steps": 2},
    "at the ends alone": {**UNCLIPPED, "checkpoint.commit_every_steps": None},
    "as the planner says, in RAM": AUTO,
    "emulated device": {**UNCLIPPED, "offload.device": "emulated"},
    "on the device": {**THERE, **UNCLIPPED},
    "on the device, clipped, every second step": {**THERE, "checkpoint.commit_every_steps": 2},
}


class Died(BaseException):
    """Stands for whatever ends a run without a word."""


def _dies_at(step: int, visit: int) -> Callable[[Run], None]:
    """Ends the run at the first look from visit `visit` of step `step` on (1 for the first)."""

    def look(run: Run) -> None:
        if run.step + 1 == step and run.executor.visits.lookahead.cursor >= visit:
            raise Died

    return look


@pytest.mark.parametrize("place", every(6, PLACES))
def test_a_run_that_dies_anywhere_is_the_same_run(place: str, new_project: NewProject, tmp_path: Path, whole: WholeOf) -> None:
    changes = {**PLACES[place], "train.max_steps": STEPS}
    expected = whole(changes)
    project = new_project("broken", changes)
    prepared = prepared_run(project)
    visits, every, done = (
        len(plan_schedule(prepared.planned.model, prepared.planned.plan).visits),
        prepared.planned.plan.commit_every,
        0,
    )
    draw = random.Random(place)
    assert place != "as the planner says, in RAM" or (every is not None and 1 < every < STEPS)
    for step in range(1 + list(PLACES).index(place) % 2, STEPS + 1, 2):  # every second one, the others at the next place
        died_in = max(step, done + 1)
        with pytest.raises(Died):
            train(project, _dies_at(died_in, draw.randrange(visits)))
        done = manifest_of(project).step
        if every is None:
            assert done == 0
        else:  # what a step's end leaves to the next forward is not committed before that is over
            assert done % every == 0 and done >= died_in - 2 - (every - 1)
    losses, resumed = train(project)
    assert losses == expected.losses
    assert_same_exports(resumed, expected.store, tmp_path)


@pytest.mark.parametrize(("device", "apart"), every(4, [("emulated", 9), ("cpu", 3), ("cpu", 1), ("emulated", 1)]))
def test_a_step_that_measures_its_norm_first_may_end_at_any_visit(
    device: str, apart: int, llama: Path, new_project: NewProject, whole: WholeOf
) -> None:
    """Compares with a run whose updates wait for the norm. `apart`: visits from one end to the next."""
    changes = {"model.name_or_path": str(llama), "train.max_steps": STEPS}
    expected = whole(changes)
    first = {"offload.norm_first": "always", "offload.gradients": "auto", "offload.device": device}
    project = new_project("broken", {**changes, **first})
    planned = prepared_run(project).planned
    visits = len(plan_schedule(planned.model, planned.plan).visits)
    assert planned.plan.norm_first
    with pytest.raises(Died):
        train(project, _dies_at(3, 1))
    for visit in range(0, visits, apart):
        with pytest.raises(Died):
            train(project, _dies_at(manifest_of(project).step + 1, visit))
    losses, store = train(project)
    assert losses == expected.losses
    assert sums(store) == sums(expected.store)


@pytest.mark.parametrize(
    "changes",
    every(
        2,
        [
            {"optimizer.state_dtype": "int8", "offload.device": "emulated"},
            {},
            {"optimizer.state_dtype": "bfloat16", **UNCLIPPED},
            {"optimizer.name": "lion", **UNCLIPPED},
            {"optimizer.name": "lion", "offload.optimizer_states": "cpu"},
        ],
    ),
    ids=["int8", "float32", "bfloat16", "lion, unclipped", "lion"],
)
def test_states_go_on_as_they_were(changes: dict[str, Any], new_project: NewProject, whole: WholeOf) -> None:
    """Compares weights, remainders and moments, and the draws that round them, by the sums of all extents."""
    project = new_project("broken", {**changes, "train.max_steps": STEPS})
    with pytest.raises(Died):
        train(project, _dies_at(4, 3))
    expected = whole(changes)
    losses, store = train(project)
    assert losses == expected.losses and (losses != whole().losses) is bool(changes)
    assert sums(store) == sums(expected.store)
    assert {tensor for _, tensor, _ in sums(store)} == set(TRAINED) or changes


@pytest.mark.parametrize("tensor", every(2, TRAINED))
def test_a_flipped_bit_is_found_and_the_step_before_goes_on(
    tensor: str, stopped: Project, tmp_path: Path, whole: WholeOf
) -> None:
    saved = manifest_of(stopped)
    extent = next(getattr(stage, tensor) for stage in saved.stages if stage.params)
    flip(Path(saved.files[0]), extent.offset + extent.size // 2)
    heard: list[str] = []
    with loaded_run(stopped, announce=heard.append) as run:
        assert run.step == saved.step - 1
        run.train(lambda report: None)
        losses, store = run.losses, run.store.paths[0].parent
    said = " ".join(heard)
    assert f"the state after step {saved.step} is damaged: {tensor} of " in said and saved.files[0] in said
    assert f"falling back to the state after step {saved.step - 1}, which is intact" in said
    expected = whole()
    assert losses == expected.losses
    assert_same_exports(store, expected.store, tmp_path)


def test_where_no_state_is_whole_nothing_is_computed(stopped: Project) -> None:
    saved = manifest_of(stopped)
    older = manifests.read(store_of(stopped), manifests.BEFORE)
    assert older is not None and older.step == saved.step - 1
    for one in (saved, older):
        extent = one.stages[1].weights
        assert extent is not None
        flip(Path(saved.files[0]), extent.offset)
    with run_of(stopped) as run, pytest.raises(SwapError, match="no older one is whole: weights of"):
        run.load(lambda count: None)
    assert manifest_of(stopped) == saved


def test_the_manifest_before_stands_in_for_a_damaged_one(stopped: Project, whole: WholeOf) -> None:
    expected = whole().losses
    saved = manifest_of(stopped)
    path = store_of(stopped) / manifests.NAME
    path.write_bytes(path.read_bytes().replace(b'"step": 2', b'"step": 3'))
    found, why = manifests.newest(path.parent)
    assert found is not None and found.step == saved.step - 1 and "its digest does not match its content" in why
    assert train(stopped)[0] == expected


def test_losses_that_are_gone_hinder_nothing(stopped: Project, whole: WholeOf) -> None:
    expected = whole().losses
    (store_of(stopped) / LOSSES).unlink()
    heard: list[str] = []
    with loaded_run(stopped, announce=heard.append) as run:
        run.train(lambda report: None)
        assert run.losses[2:] == expected[2:] and all(loss != loss for loss in run.losses[:2])
    assert any("losses of earlier steps are not known" in said for said in heard)


def test_what_a_commit_could_not_write_ends_the_run_at_the_one_before(
    new_project: NewProject, monkeypatch: pytest.MonkeyPatch, whole: WholeOf
) -> None:
    """The flush of one commit fails, once: it is not tried again, for a second one would seem to work."""
    project = new_project(changes={"train.max_steps": STEPS})
    expected = whole().losses
    with loaded_run(project) as run:
        flush, flushed = run.store.sync, list[int]()

        def fail() -> None:
            flushed.append(run.step)
            if len(flushed) == 3:
                raise SwapError("syncing failed", hint=None)
            flush()

        run.saver.commits._flush = fail
        with pytest.raises(SwapError, match="syncing failed") as ended:
            run.train(lambda report: None)
    assert len(flushed) == 3
    assert "the state after step 1 is saved" in str(ended.value.hint)
    assert manifest_of(project).step == 1
    assert train(project)[0] == expected


def test_no_update_writes_over_what_the_last_manifest_names(new_project: NewProject) -> None:
    """Holds commits back as long as nobody waits for them."""
    project = new_project(changes={"train.max_steps": STEPS, **UNCLIPPED})
    with loaded_run(project) as run:
        daemon, written = run.daemon, list[tuple[int, set[int]]]()
        update = daemon.update

        def look(request: Any) -> int:
            homes = (request.remainder, request.momentum, request.variance)
            targets = {request.weights_target, *(home.target for home in homes)}
            on_disk = manifest_of(project)
            named = {extent.offset for stage in on_disk.stages for _, extent in stage.extents()}
            written.append((on_disk.step, targets & named))
            return update(request)

        daemon.update = look  # type: ignore[method-assign]
        run.train(lambda report: None)
    assert [clash for _, clash in written if clash] == [] and {step for step, _ in written} >= set(range(STEPS))


@pytest.mark.parametrize("every", [1, 3])
def test_what_commits_write_is_as_planned(every: int, new_project: NewProject) -> None:
    """Writes what rests in RAM in steps that are committed, and in no other; of what rests on the ssd nothing more."""
    project = new_project(changes={**RAM, **UNCLIPPED, "train.max_steps": STEPS, "checkpoint.commit_every_steps": every})
    with loaded_run(project) as run:
        before = run.daemon.counters().written_bytes
        run.train(lambda report: None)
        written, predicted = run.daemon.counters().written_bytes - before, run.plan.predicted.written_per_step
        per_commit = 2 * run.model.stored_parameters + run.model.stored_state_bytes
        assert predicted == pytest.approx(per_commit / every, rel=1e-3) and run.saver.saved_bytes == 0
    assert written == per_commit * STEPS // every


def test_an_orderly_end_between_two_commits_saves_the_state(new_project: NewProject, whole: WholeOf) -> None:
    """Checks that what is gone on with from there ends as if nobody had stopped."""
    changes = {**AUTO, "train.max_steps": STEPS}
    project = new_project(changes=changes)
    every = (ready := prepared_run(project)).planned.plan.commit_every
    assert every is not None and every > 1
    with pytest.raises(Interrupted, match=f"stopped after step 1 of {STEPS}"):
        train(ready, interrupt(2, "forward"))
    assert manifest_of(project).step == 1
    assert train(project)[0] == whole(changes).losses


def test_nothing_is_named_behind_a_flush_that_failed(stopped: Project) -> None:
    """Checks what was waiting its turn already too: a second flush would seem to work."""
    flushes, named, both_begun = list[int](), list[Manifest](), Event()

    def flush() -> None:
        flushes.append(1)
        assert both_begun.wait(300)
        raise SwapError("syncing failed")

    commits = Commits(flush=flush, name=named.append)
    for _ in range(2):
        commits.begin(manifest_of(stopped))
    both_begun.set()
    with pytest.raises(SwapError, match="syncing failed"):
        commits.finish()
    commits.close()
    assert (len(flushes), named) == (1, [])
