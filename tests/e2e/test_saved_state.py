"""Tests that what is saved stays saved: folders missing or in another order, signals at any time, a step that is not finite."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from proof.parsers import with_digest

from fuyou_cli.core.errors import FuyouError, Interrupted, NumericsError, UsageError
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.length import LearningRate
from fuyou_cli.training.prepare import run_directories
from fuyou_cli.training.report import StepReport
from fuyou_cli.training.run import Run
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.store_folders import PART_FILE

from .conftest import NewProject, Project, WholeOf
from .running import STEPS, exported, interrupt, loaded_run, manifest_of, prepared_run, run_of, stop, store_of, train


def _striped(folder: Path, *names: str) -> dict[str, Any]:
    return {"train.max_steps": STEPS, "offload.dir": [str(folder / name) for name in names]}


@pytest.fixture
def striped(made_once: Callable[..., Path], materials: Path) -> Project:
    """Makes a project on two drives, `a` and `b`, stopped in step 3."""

    def make(project: Project) -> None:
        project.write_recipe(_striped(project.folder, "a", "b"))
        stop(project, interrupt(3, "forward"))

    return Project(folder=made_once("striped", make), materials=materials)


def _folder(project: Project, drive: str) -> Path:
    (found,) = (project.folder / drive).iterdir()
    return found


def test_a_missing_drive_is_refused_and_costs_nothing(striped: Project, whole: WholeOf) -> None:
    away = striped.folder / "away"
    (striped.folder / "b").rename(away)
    with pytest.raises(UsageError, match=r"store\.bin is missing"):
        train(striped)
    (striped.folder / "b").mkdir()  # an empty mount point
    with pytest.raises(UsageError, match=r"store\.bin is missing"):
        train(striped)
    (striped.folder / "b").rmdir()
    away.rename(striped.folder / "b")
    assert train(striped)[0] == whole().losses


@pytest.mark.parametrize("drive", ["a", "b"])
def test_a_drive_that_goes_during_a_run_is_named_and_costs_a_step(
    drive: str, new_project: NewProject, tmp_path: Path, whole: WholeOf
) -> None:
    """Unmounts or removes it: what is open goes on to take what is written, and nobody would find it again."""
    project = new_project("striped", _striped(tmp_path / "striped", "a", "b"))
    there, away = project.folder / drive, project.folder / "away"

    def take_away(run: Run) -> None:
        if run.step == 3 and there.exists():
            there.rename(away)

    with pytest.raises(FuyouError) as lost:
        train(project, take_away)
    said, hint = lost.value.message, str(lost.value.hint)
    between = any(f"{name}: No such file" in said for name in ("losses.bin", "manifest.json"))  # the flush and the manifest
    assert f"/{drive}/" in said and (between or ("store.bin: Stale file handle" in said and "put it back" in hint))
    away.rename(there)
    assert 2 <= manifest_of(project).step <= 3
    assert train(project)[0] == whole().losses


def test_a_file_cut_short_is_refused(striped: Project) -> None:
    store = _folder(striped, "a") / "store.bin"
    os.truncate(store, store.stat().st_size // 2)
    with pytest.raises(UsageError, match=r"store\.bin has .* bytes, but needs at least"):
        train(striped)


@pytest.mark.parametrize("order", [("b", "a"), ("b",), ("c", "b")], ids=str)
def test_folders_of_a_saved_run_are_not_taken_by_another(order: tuple[str, ...], striped: Project, whole: WholeOf) -> None:
    """Names the folders in another order, or without the first one, which has the manifest."""
    striped.write_recipe(_striped(striped.folder, *order))
    with pytest.raises(UsageError, match="of a saved run after step 2"):
        train(striped)
    striped.write_recipe(_striped(striped.folder, "a", "b"))
    assert train(striped)[0] == whole().losses


def test_starting_over_elsewhere_leaves_no_state_that_lies(striped: Project, whole: WholeOf) -> None:
    striped.write_recipe({**_striped(striped.folder, "b", "a"), "checkpoint.resume": "never"})
    assert train(striped)[0] == whole().losses
    striped.write_recipe({**_striped(striped.folder, "a", "b")})
    with pytest.raises(UsageError, match="of a saved run"):
        train(striped)
    striped.write_recipe({**_striped(striped.folder, "b", "a")})
    assert train(striped)[0] == whole().losses


def test_a_folder_of_another_run_is_refused(striped: Project) -> None:
    part = _folder(striped, "b") / PART_FILE
    part.write_text(part.read_text().replace(manifest_of(striped).run, "0" * 16))
    with pytest.raises(UsageError, match="belongs to another run"):
        train(striped)


def test_a_damaged_part_file_is_not_taken_for_a_free_folder(striped: Project) -> None:
    (_folder(striped, "b") / PART_FILE).write_text("{")
    striped.write_recipe(_striped(striped.folder, "b"))
    with pytest.raises(UsageError, match=r"part\.json is damaged"):
        train(striped)


def test_the_manifest_is_looked_at_again_under_the_lock(stopped: Project) -> None:
    prepared = prepared_run(stopped)
    train(stopped, None)
    with pytest.raises(UsageError, match="another process has used the store"):
        run_of(prepared)


def test_interrupted_while_loading_starts_again(new_project: NewProject, whole: WholeOf) -> None:
    project = new_project("loading", {"train.max_steps": STEPS})

    def press(count: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with (
        pytest.raises(Interrupted) as stopped,
        run_of(project) as run,
    ):
        run.load(press)
    assert stopped.value.message == "stopped while loading" and "nothing was trained yet" in str(stopped.value.hint)
    assert train(project)[0] == whole().losses


def test_interrupted_while_a_saved_state_is_read_loses_nothing(stopped: Project, whole: WholeOf) -> None:
    with run_of(stopped) as run:
        restore = run.files.restore

        def press(*saved: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            restore(*saved)

        run.files.restore = press  # type: ignore[method-assign]
        with pytest.raises(Interrupted, match="stopped while loading") as ended:
            run.load(lambda count: None)
    assert "the state after step 2 is saved" in str(ended.value.hint) and ended.value.exit_code == 130
    assert train(stopped)[0] == whole().losses


@pytest.mark.parametrize(("asked_before", "presses"), [(False, 1), (False, 2), (True, 1)])
def test_interrupted_while_saving(asked_before: bool, presses: int, stopped: Project, whole: WholeOf) -> None:
    """The first time is announced and waits; the second gives up what is being saved, not what was saved before."""
    heard: list[str] = []
    prepared = prepared_run(stopped)
    with loaded_run(prepared, announce=heard.append) as run:
        save, last = run.saver.save, 3 if asked_before else STEPS

        def pressed() -> None:
            for _ in range(presses):
                os.kill(os.getpid(), signal.SIGINT)
            save()

        run.saver.save = pressed  # type: ignore[method-assign]
        if asked_before:
            run.executor.between_micro_batches = lambda: _stop_in(run, last)
        if presses == 2 or asked_before:
            with pytest.raises(Interrupted) as ended:
                run.train(lambda report: None)
            step = last - 1 if asked_before else last
            assert ended.value.message == f"stopped while saving the state after step {step}"
            saved = manifest_of(stopped).step  # a commit that has begun is waited for
            assert saved in (step - 1, step) and f"after step {saved} is saved" in str(ended.value.hint)
            assert ended.value.exit_code == 130
        else:
            run.train(lambda report: None)
    assert heard[0].startswith("stopping at the next micro-batch" if asked_before else "saving the state;")
    assert "a second Ctrl-C loses" in heard[0] and len(heard) == 1
    assert max(len(line) for said in heard for line in said.splitlines()) <= 80
    assert train(stopped)[0] == whole().losses


def _stop_in(run: Run, step: int) -> None:
    """Asks to stop in step `step`."""
    if run.step + 1 == step and not run.stopping.requested:
        os.kill(os.getpid(), signal.SIGINT)
    run._between_micro_batches()


def test_a_gradient_that_is_not_finite_saves_the_step_before(new_project: NewProject, whole: WholeOf, tmp_path: Path) -> None:
    project = new_project("poisoned", {"train.max_steps": STEPS})
    with loaded_run(project) as run:
        sums = run.executor.visits.sums

        def poison() -> None:
            if run.step == 3:
                for total in sums._sums.values():
                    total.flat.fill_(float("nan"))

        run.executor.between_micro_batches = poison
        with pytest.raises(NumericsError, match="step 4") as ended:
            run.train(lambda report: None)
    assert "after step 3 is saved" in str(ended.value.hint)
    losses, store = train(project)
    assert losses == whole().losses
    assert exported(store, tmp_path / "out")


def test_a_copy_of_the_run_can_be_put_back(striped: Project, whole: WholeOf) -> None:
    """Restores a folder byte for byte: it is the same run."""
    copy = striped.folder / "copy"
    shutil.copytree(_folder(striped, "b"), copy)
    shutil.rmtree(_folder(striped, "b"))
    shutil.copytree(copy, striped.folder / "b" / _folder(striped, "a").name)
    assert train(striped)[0] == whole().losses


def test_a_file_that_no_run_claims_is_not_written_over(new_project: NewProject, whole: WholeOf) -> None:
    project = new_project("foreign", {"train.max_steps": STEPS})
    (directory,) = run_directories(load_recipe(project.recipe).recipe)
    directory.mkdir(parents=True)
    (directory / "store.bin").write_text("my thesis")
    with pytest.raises(UsageError, match=r"store\.bin holds data that does not belong to any known run"):
        train(project)
    assert (directory / "store.bin").read_text() == "my thesis"
    (directory / "store.bin").unlink()
    with (directory / "store.bin").open("wb") as left:  # by a run that was killed before its first write
        os.posix_fallocate(left.fileno(), 0, 1 << 20)
    assert train(project)[0] == whole().losses


def test_a_store_whose_manifests_are_gone_is_not_written_over_without_a_word(stopped: Project, whole: WholeOf) -> None:
    """It cannot go on, and starts over."""
    store = store_of(stopped)
    for name in (manifests.NAME, manifests.BEFORE):
        (store / name).unlink()
    said: list[str] = []
    assert train(prepared_run(stopped, say=said.append))[0] == whole().losses
    (note,) = (text for text in said if "no saved state" in text)
    assert f"{store / 'store.bin'} holds data but no saved state" in note and "starts over" in note
    prepared_run(stopped, say=said.append)
    assert sum("no saved state" in text for text in said) == 1


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_file_with_a_second_name_is_not_written_over(resume: str, new_project: NewProject, tmp_path: Path) -> None:
    project = new_project("linked", {"train.max_steps": STEPS, "checkpoint.resume": resume})
    (directory,) = run_directories(load_recipe(project.recipe).recipe)
    directory.mkdir(parents=True)
    victim = tmp_path / "victim"
    victim.write_bytes(b"")
    os.link(victim, directory / "store.bin")
    with pytest.raises(UsageError, match="has a second name"):
        train(project)
    assert victim.stat().st_size == 0


def test_a_running_run_is_not_said_to_be_broken(new_project: NewProject, tmp_path: Path) -> None:
    project = new_project("running", {"train.max_steps": STEPS})
    seen: list[str] = []

    def look(run: Run) -> None:
        if run.step == 3 and not seen:
            assert manifest_of(project).step >= 2
            for other in (lambda: prepared_run(project), lambda: exported(store_of(project), tmp_path / "export")):
                with pytest.raises(FuyouError, match="is in use by a running fuyou") as refused:
                    other()
                seen.append(f"{refused.value.hint}")
                assert refused.value.exit_code == 1

    train(project, look)
    assert seen == ["stop that run first (Ctrl-C saves it)"] * 2


def test_a_saved_run_that_was_moved_does_not_begin_anew_unasked(stopped: Project, whole: WholeOf) -> None:
    project = stopped
    away = project.folder / "renamed"
    project.out.rename(away)
    project.write_recipe({"train.max_steps": STEPS, "output_dir": str(away)})
    with pytest.raises(UsageError, match=r"holds a run that was saved after step 2 in .* and moved since"):
        train(project)
    away.rename(project.out)
    project.write_recipe({"train.max_steps": STEPS})
    assert train(project)[0] == whole().losses
    project.out.rename(away)
    project.write_recipe({"train.max_steps": STEPS, "output_dir": str(away), "checkpoint.resume": "never"})
    assert train(project)[0] == whole().losses


def test_what_has_the_name_of_the_losses_is_found_before_a_step_is_computed(stopped: Project) -> None:
    losses, steps = store_of(stopped) / "losses.bin", list[int]()
    losses.unlink()
    os.mkfifo(losses)
    with pytest.raises(FuyouError, match=r"losses\.bin: .* is not a plain file") as refused:
        train(stopped, lambda run: steps.append(run.step))
    assert "move it away; the state after step 2 is saved" in str(refused.value.hint)
    assert not steps


def test_a_run_that_fails_before_its_first_step_is_the_same_run_afterwards(new_project: NewProject, whole: WholeOf) -> None:
    project = new_project("new", {"train.max_steps": STEPS})

    def stand_in_the_way(count: int) -> None:
        losses = next(project.folder.rglob("store.bin")).with_name("losses.bin")
        if not losses.is_fifo():
            losses.unlink()
            os.mkfifo(losses)

    with (
        run_of(project) as run,
        pytest.raises(FuyouError, match="is not a plain file"),
    ):
        run.load(stand_in_the_way)
        run.train(lambda report: None)
    next(project.folder.rglob("losses.bin")).unlink()
    assert train(project)[0] == whole().losses


CODE = """
from transformers import GPT2LMHeadModel

class OwnForCausalLM(GPT2LMHeadModel):
    pass
"""


def test_a_model_s_own_code_that_changed_is_refused(new_project: NewProject, materials: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(materials / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_own.py").write_text(CODE)
    changes = {"train.max_steps": 4, "model.name_or_path": str(folder), "model.trust_remote_code": True}
    project = new_project(changes=changes)
    stop(project, interrupt(3, "forward"))
    (folder / "modeling_own.py").write_text(CODE + "# changed\n")
    with pytest.raises(UsageError, match=r"the model's own code \(\*\.py in model\.name_or_path\) changed since"):
        train(project)
    (folder / "modeling_own.py").write_text(CODE)
    assert len(train(project)[0]) == 4


def _rates(project: Project, upto: int = STEPS) -> list[float]:
    """The rates of the steps that a run of the project does, in which Ctrl-C stops it after step `upto`."""
    rates: list[float] = []
    with loaded_run(project) as run:

        def on_step(report: StepReport) -> None:
            rates.append(report.lr)
            if report.step == upto < STEPS:
                os.kill(os.getpid(), signal.SIGINT)

        with suppress(Interrupted):
            run.train(on_step)
    return rates


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "of a build before"])
def test_a_saved_run_keeps_the_rule_of_its_learning_rates(is_new: bool, stopped: Project) -> None:
    """Up to where the warm-up ends, after step 2, both rules give the same bits. A build before did not name its rule."""
    manifest = store_of(stopped) / manifests.NAME
    content = json.loads(manifest.read_text())
    assert content["step"] == 2 and content.pop("peak_after_warmup") is True
    if not is_new:
        del content["digest"]
        manifest.write_bytes(with_digest(json.dumps(content).encode()))
    rule = LearningRate(
        name="cosine", peak=3e-3, warmup_steps=2, total_steps=STEPS, min_ratio=0.1, peak_after_warmup=is_new
    )  # fmt: skip
    least = 3e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (3 if is_new else 4) / 4)))
    assert rule.at(STEPS) == least and (rule.at(3) == 3e-3) is is_new
    assert _rates(stopped, upto=4) == [rule.at(3), rule.at(4)]  # which are saved with the rule
    assert manifest_of(stopped).peak_after_warmup is is_new
    assert _rates(stopped) == [rule.at(5), rule.at(6)]


def test_a_run_of_a_build_before_keeps_the_padding_that_it_began_with(stopped: Project) -> None:
    """Such a build padded all rows of a step to the longest, and did not say so."""
    manifest = store_of(stopped) / manifests.NAME
    content = json.loads(manifest.read_text())
    named = {name: content["numerics"].pop(name) for name in ("padding", "width_step", "document_step")}
    assert named["padding"] != "step"
    del content["digest"]
    manifest.write_bytes(with_digest(json.dumps(content).encode()))
    ready = prepared_run(stopped)
    assert ready.planned.plan.numerics.padding == "step" and ready.planned.plan.typical is None
    assert not ready.planned.anatomy.isolated  # attention is computed for a whole batch, as it was
    losses, _ = train(ready)
    assert len(losses) == STEPS and manifest_of(stopped).numerics.padding == "step"
