"""Tests saved runs that go on with another rate, schedule or length: with the losses of a loop of PyTorch and transformers' own
schedulers that does the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from proof.parsers import with_digest

from fuyou_cli.core.errors import UsageError
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.manifest import Change

from .conftest import NewProject, Project
from .running import STEPS, exported, interrupt, manifest_of, prepared_run, stop, store_of, train
from .test_adapter_runs import base_of, steps_in_memory
from .test_stopping import RAM

PLAIN = {"precision": {"compute": "float32"}, "lr_scheduler": {"name": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.1}}


def _rate(name: str, *, peak: float, warmup: int, total: int) -> Callable[[int], float]:
    """The rate of each step by transformers' scheduler of so many steps; after the warm-up, at the index of the step before."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    options = {"scheduler_specific_kwargs": {"min_lr_rate": 0.1}} if name == "cosine_with_min_lr" else {}
    scheduler = transformers.get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total, **options)
    factor = scheduler.lr_lambdas[0]
    return lambda step: peak * factor(step if step <= warmup else step - 1)


@pytest.mark.parametrize("tiers", [{}, pytest.param(RAM, marks=pytest.mark.slow)], ids=["on the ssd", "in RAM"])
@pytest.mark.parametrize(
    ("changes", "later"),
    [
        ({"train.max_steps": 9}, ("cosine_with_min_lr", 3e-3, 2, 9)),
        ({"optimizer.lr": 1e-3}, ("cosine_with_min_lr", 1e-3, 2, STEPS)),
        ({"optimizer.weight_decay": 10.0, "optimizer.eps": 1e-3}, ("cosine_with_min_lr", 3e-3, 2, STEPS)),
        (
            {
                "train.max_steps": 8,
                "optimizer.lr": 1e-3,
                "lr_scheduler": {"name": "linear", "warmup_ratio": 0.5, "min_lr_ratio": 0},
            },
            ("linear", 1e-3, 4, 8),  # it is in its warm-up again
        ),
    ],
    ids=["longer", "another rate", "another decay", "all of it"],
)
def test_losses_are_those_of_a_loop_that_changes_the_same(
    changes: dict[str, Any], later: tuple[str, float, int, int], tiers: dict[str, Any], new_project: NewProject, llama: Path
) -> None:
    usual = {**PLAIN, **tiers, "model.name_or_path": str(llama), "train.max_steps": STEPS}
    project = new_project(changes=usual)
    stop(project, interrupt(4, "forward"))
    project.write_recipe({**usual, **changes})
    with pytest.raises(UsageError) as refused:
        prepared_run(project)
    assert str(refused.value.hint).startswith("add --accept-changes to go on with it, or put it back: ")
    ready = prepared_run(project, accept_changes=True)
    assert ready.planned.manifest is not None and ready.planned.manifest.step == 3
    name, peak, warmup, total = later
    first, then = (
        _rate("cosine_with_min_lr", peak=3e-3, warmup=2, total=STEPS),
        _rate(name, peak=peak, warmup=warmup, total=total),
    )
    wanted = list(
        steps_in_memory(
            ready, base_of(ready).train(), rate=lambda step: (first if step <= 3 else then)(step),
            before=(3, ready.planned.manifest.settings or {}),
        )
    )  # fmt: skip
    stop(ready, interrupt(5, "forward"))
    losses, _ = train(project)  # the recipe says it, and the state knows
    assert len(losses) == total and losses == pytest.approx(wanted, rel=1e-6)
    assert {(one.step, one.key, one.now) for one in manifest_of(project).changes} >= {
        (3, key, value) for key, value in changes.items() if key != "lr_scheduler"
    }


def test_a_finished_run_is_made_longer_by_the_command(new_project: NewProject, tmp_path: Path) -> None:
    """The log and the report say what changed, when and from what; the refusal before says what to write."""
    project = new_project(changes={"train.max_steps": 3})
    project.done("finetune", project.recipe)
    longer = ("finetune", project.recipe, "train.max_steps=5", "optimizer.lr=0.001")
    refused = project.fuyou(*longer)
    said = " ".join(refused.stderr.split())
    assert refused.returncode == 2 and "train.max_steps was 3, is 5" in said and "optimizer.lr was 0.003, is 0.001" in said
    assert "add --accept-changes" in said and "train.max_steps=3" in said and "optimizer.lr=0.003" in said
    done = project.done(*longer, "--accept-changes", "logging.every_steps=2")
    ours, theirs = project.exported(), exported(store_of(project), tmp_path / "out")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours), "of the longer run"
    assert "changed: " in done.stderr and sorted(project.losses()) == [1, 2, 3, 4, 5]
    told = json.loads(project.fuyou("report", project.out, "--json").stdout)["changes"]
    assert {"step": 3, "key": "train.max_steps", "before": 3, "now": 5} in told
    assert {"step": 3, "key": "optimizer.lr", "before": 0.003, "now": 0.001} in told
    assert {"step": 3, "key": "logging.every_steps", "before": 1, "now": 2} in told and len(told) == 3
    shown = " ".join(project.fuyou("report", project.out).stdout.split())
    assert "changed after step 3: optimizer.lr was 0.003, is 0.001" in shown
    assert manifest_of(project).changes == tuple(Change(**one) for one in told)
    short = project.fuyou("finetune", project.recipe, "train.max_steps=4", "--accept-changes")
    assert short.returncode == 2 and "has done 5 steps, but the recipe asks for 4" in " ".join(short.stderr.split())
    assert "train.max_steps=5 or more" in " ".join(short.stderr.split())


def test_what_was_accepted_is_known_before_the_next_step_is_saved(stopped: Project) -> None:
    longer = {"train.max_steps": STEPS + 2}
    stopped.write_recipe(longer)
    before = manifests.read(store_of(stopped), manifests.BEFORE)
    stop(prepared_run(stopped, accept_changes=True), interrupt(3, "forward"))
    assert [(one.key, one.before, one.now) for one in manifest_of(stopped).changes] == [("train.max_steps", STEPS, STEPS + 2)]
    assert manifests.read(store_of(stopped), manifests.BEFORE) == before, "an older state is kept as it was"
    assert len(train(stopped)[0]) == STEPS + 2


def test_keys_that_change_no_step_go_on_unasked_and_are_recorded(stopped: Project) -> None:
    stopped.write_recipe({"train.max_steps": STEPS, "eval.at_start": False, "checkpoint.commit_every_steps": 2, **RAM})
    train(stopped)
    keys = {"eval.at_start": (True, False), "checkpoint.commit_every_steps": ("auto", 2)}
    assert {one.key: (one.before, one.now) for one in manifest_of(stopped).changes} == keys


def _unrecorded(project: Project) -> None:
    """Makes the state one of a build that recorded neither keys nor changes."""
    manifest = store_of(project) / manifests.NAME
    content = json.loads(manifest.read_text())
    assert content.pop("settings")["optimizer.lr"] == 3e-3 and content.pop("changes") == []
    del content["digest"]
    manifest.write_bytes(with_digest(json.dumps(content).encode()))


def test_a_state_that_does_not_say_what_its_recipe_said(stopped: Project) -> None:
    """Its length may change; for another rate it has to be run once as it was, which a stop at once is enough for."""
    _unrecorded(stopped)
    stopped.write_recipe({"train.max_steps": STEPS, "optimizer.lr": 1e-3})
    with pytest.raises(UsageError, match=r"optimizer changed since it was saved \(by a version") as refused:
        prepared_run(stopped, accept_changes=True)
    assert "run it once with its old recipe" in str(refused.value.hint)
    stopped.write_recipe({"train.max_steps": STEPS})
    stop(stopped, interrupt(3, "forward"))
    stopped.write_recipe({"train.max_steps": STEPS, "optimizer.lr": 1e-3})
    assert len(train(prepared_run(stopped, accept_changes=True))[0]) == STEPS


def test_such_a_state_can_be_made_longer(stopped: Project) -> None:
    _unrecorded(stopped)
    stopped.write_recipe({"train.max_steps": STEPS + 1})
    with pytest.raises(UsageError, match=r"schedule \(lr_scheduler, train.max_steps or train.epochs\) changed") as refused:
        prepared_run(stopped)
    assert "--accept-changes" in str(refused.value.hint)
    assert len(train(prepared_run(stopped, accept_changes=True))[0]) == STEPS + 1
