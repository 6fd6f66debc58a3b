"""Tests that older states are gone back to where the newest has been damaged, and only there; nothing that is kept is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fuyou_cli.core.errors import SwapError, UsageError
from fuyou_cli.training.report import StepReport
from fuyou_cli.training.state import at_rest as verify
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.saver import captured_generators

from .conftest import CommandIn, NewProject, Project, WholeOf, ended
from .running import STEPS, interrupt, loaded_run, manifest_of, run_of, stop, store_of, train
from .test_every_step_committed import Died, _dies_at


def _damage_manifest(store: Path) -> None:
    path = store / manifests.NAME
    path.write_bytes(path.read_bytes().replace(b'"step": ', b'"step":  ', 1))


# ---- the newest manifest is damaged --------------------------------------------------------------------------------


def test_verify_tells_of_a_damaged_manifest_and_the_run_goes_on(stopped: Project, whole: WholeOf, command: CommandIn) -> None:
    expected = whole().losses
    store = store_of(stopped)
    _damage_manifest(store)
    fuyou = command(stopped)
    code, out, _ = fuyou("verify", str(store))
    assert code == 1 and f"{store / manifests.NAME} is damaged" in out
    older = manifests.read(store, manifests.BEFORE)
    assert older is not None and f"continues from the state after step {older.step}, which is intact" in out
    told = json.loads(fuyou("verify", str(store), "--json")[1])
    assert str(store / manifests.NAME) in told["states"][0]["problem"] and not told["states"][0]["older"]
    assert train(stopped)[0] == expected
    assert (store / manifests.DAMAGED).exists()


def test_a_manifest_that_cannot_be_read_now_is_not_gone_back_behind(stopped: Project) -> None:
    store = store_of(stopped)
    path, away = store / manifests.NAME, store / "away"
    path.rename(away)
    path.symlink_to(path)  # "too many levels of symbolic links": no permission, for whoever may read everything
    with pytest.raises(UsageError, match=r"manifest\.json: cannot be read"):
        train(stopped)
    path.unlink()
    away.rename(path)
    assert manifest_of(stopped).step == 2


def test_what_is_read_wrong_once_is_read_again(stopped: Project, monkeypatch: pytest.MonkeyPatch, whole: WholeOf) -> None:
    expected = whole().losses
    calls: list[int] = []

    def wrong_once(data: Any, *, position: int = 0) -> int:
        calls.append(position)
        return real(data, position=position) ^ (len(calls) == 5)

    real = verify.checksum
    monkeypatch.setattr(verify, "checksum", wrong_once)
    assert train(stopped)[0] == expected
    assert len(calls) > 5


# ---- what a saved run does not go on with ----------------------------------------------------------------------------


def test_another_kind_of_device_is_named(stopped: Project) -> None:
    stopped.write_recipe({"train.max_steps": STEPS, "offload.device": "emulated"})
    with pytest.raises(UsageError, match=r"the kind of device .* changed since"):
        train(stopped)


def test_a_folder_whose_run_is_still_loading_is_none_to_go_on_from(new_project: NewProject) -> None:
    project = new_project("loading", {"train.max_steps": STEPS})

    def stop(count: int) -> None:
        raise Died

    with pytest.raises(Died), run_of(project) as run:
        run.load(stop)
    project.write_recipe({"train.max_steps": STEPS, "checkpoint.resume": str(store_of(project))})
    with pytest.raises(UsageError, match=r"checkpoint\.resume: nothing is saved yet in"):
        train(project)


def test_the_weights_it_began_with_are_not_needed_any_more(new_project: NewProject, tmp_path: Path, whole: WholeOf) -> None:
    expected = whole().losses
    own = tmp_path / "own"
    project = new_project("stopped", {"train.max_steps": STEPS, "model.name_or_path": str(own)})
    shutil.copytree(project.materials / "model", own)
    stop(project, interrupt(3, "forward"))
    for path in own.glob("*.safetensors"):
        path.unlink()
    done = project.done("finetune", project.recipe)
    assert "the weights are not compared with those that the run began with" in done.stderr
    assert project.losses() == {step: expected[step - 1] for step in range(3, STEPS + 1)}


# ---- how it is told ------------------------------------------------------------------------------------------------


def test_an_error_of_the_store_behind_a_step_is_the_one_that_is_told(new_project: NewProject) -> None:
    """Gives up what it has begun to fetch when asked to stop: what becomes of that is no bug of ours."""
    project = new_project("broken", {"train.max_steps": STEPS, "train.clip_grad_norm": None, "offload.defer_updates": 1})

    def break_and_stop(report: StepReport) -> None:
        if report.step == 3:
            os.truncate(run.store.paths[0], 0)
            os.kill(os.getpid(), signal.SIGINT)

    with loaded_run(project) as run, pytest.raises(SwapError, match=r"store\.bin at byte .* No data available"):
        run.train(break_and_stop)


def test_the_states_of_generators_are_there_from_the_first_commit_on(new_project: NewProject) -> None:
    found = []
    for name in ("one", "two"):
        project = new_project(name, {"train.max_steps": STEPS})
        with pytest.raises(Died):
            train(project, _dies_at(1, 1))
        found.append(manifest_of(project).random)
    assert found[0] and found[0] == found[1]


def test_generators_go_on_as_they_were(stopped: Project) -> None:
    """Of Python and NumPy, too: a model's own code may draw from them."""
    with loaded_run(stopped):
        assert captured_generators(torch.device("cpu")) == manifest_of(stopped).random


def test_what_a_stop_saved_between_commits_stays_until_the_next(stopped: Project, whole: WholeOf) -> None:
    """Its extents are none that updates may write over."""
    expected, said = whole().losses, list[str]()
    stopped.write_recipe({"train.max_steps": STEPS, "checkpoint.commit_every_steps": 4})
    with pytest.raises(Died):
        train(stopped, _dies_at(4, 3))
    assert train(stopped, say=said.append)[0] == expected
    assert not [text for text in said if "damaged" in text]


def test_who_insists_leaves_at_once(new_project: NewProject) -> None:
    program = (
        "import os, signal\n"
        "from fuyou_cli.training.run import StopRequests\n"
        "with StopRequests(print, may_abandon=bool, at_stake=str) as stopping:\n"
        "    stopping.end()\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    print('still here', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('never said')\n"
    )
    done = ended(new_project().begin(first=program))
    assert done.returncode == 130, done
    assert "a second Ctrl-C ends the process at once" in done.stdout
    assert "still here" in done.stdout and "never said" not in done.stdout
