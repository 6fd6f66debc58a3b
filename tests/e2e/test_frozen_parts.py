"""Tests a recipe with `freeze`: the same run as plain PyTorch with `requires_grad=False`, and what a resumed run must agree
on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuyou_cli.core.errors import Interrupted, UsageError
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.exporting import export_store
from fuyou_cli.training.state.at_rest import saved_store

from .conftest import NewProject, Project
from .running import STEPS, exported, interrupt, manifest_of, planned, prepared_run, store_of, train

FREEZE = ["transformer.wte", "transformer.h.0.*"]  # the head is tied to the embedding


def _is_frozen(name: str) -> bool:
    return name.startswith(("transformer.wte.", "transformer.h.0.", "lm_head."))


@pytest.mark.parametrize(
    "changes", [{}, {"offload.device": "emulated", "offload.activations": "swap"}], ids=["cpu", "emulated"]
)
def test_it_trains_the_rest_resumes_and_exports_frozen_weights_as_they_came(
    changes: dict[str, Any], new_project: NewProject
) -> None:
    keys = {**changes, "freeze": FREEZE}
    whole, stopped = new_project("whole", keys), new_project("stopped", keys)
    losses, _ = train(whole)
    with pytest.raises(Interrupted):
        train(stopped, interrupt(3, "forward"))
    assert train(stopped)[0] == losses and len(losses) == STEPS
    ours, again = (exported(store_of(project), project.folder / "model") for project in (whole, stopped))
    began = load_file(whole.materials / "model/model.safetensors")  # float32, and the run computes in bfloat16
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    assert {name for name in ours if torch.equal(ours[name], began[name])} == {name for name in ours if _is_frozen(name)}
    assert all(stage.frozen and not stage.momentum for stage in manifest_of(whole).stages if _is_frozen(stage.name + "."))


def test_without_the_models_files_frozen_weights_are_rounded_and_that_is_said(
    new_project: NewProject, materials: Path, tmp_path: Path
) -> None:
    model, away = Path(shutil.copytree(materials / "model", tmp_path / "start")), tmp_path / "away"
    keys = {"freeze": FREEZE, "model.name_or_path": str(model), "train.max_steps": 2, "export.at_end": False}
    project = new_project(changes=keys)
    assert (ran := project.fuyou("finetune", project.recipe)).returncode == 0, ran.stderr
    store = store_of(project)
    began, said = load_file(model / "model.safetensors"), list[str]()
    model.rename(away)
    (path,) = export_store(
        saved_store(store), tmp_path / "rounded", dtype="float32", max_shard_size=1 << 30, say=said.append, model_dir=None
    )
    rounded, name = load_file(path), "transformer.wte.weight"
    assert torch.equal(rounded[name], began[name].bfloat16().float()) and not torch.equal(rounded[name], began[name])
    assert any("what was not trained is written as it was computed with, rounded to bfloat16" in line for line in said)
    export_store(saved_store(store), tmp_path / "narrow", dtype="bfloat16", max_shard_size=1 << 30, say=said.append)
    assert len(said) == 1  # where that is no loss
    there = project.fuyou("export", "recipe.yaml", tmp_path / "own", "--dtype", "float32", f"model.name_or_path={away}")
    assert there.returncode == 0 and "rounded" not in there.stderr, there.stderr
    assert torch.equal(load_file(tmp_path / "own" / "model.safetensors")[name], began[name])
    save_file({**began, name: began[name] * 1.01}, away / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"model\.safetensors: transformer\.wte\.weight is not what the run began with"):
        export_store(saved_store(store), tmp_path / "other", dtype="float32", max_shard_size=1 << 30, model_dir=away)
    assert not (tmp_path / "other").exists()


def test_a_run_goes_on_with_the_same_parts_alone(stopped: Project) -> None:
    stopped.write_recipe({"freeze": FREEZE})
    with pytest.raises(UsageError, match=r"because which parameters are trained \(freeze\) changed since") as refused:
        prepared_run(stopped)
    assert "checkpoint.resume=never" in str(refused.value.hint)


def test_what_is_frozen_with_another_weight_is_told(new_project: NewProject) -> None:
    said: list[str] = []
    planned(load_recipe(new_project("project", {"freeze": ["lm_head"]}).recipe).recipe, say=said.append)
    assert "note: freeze: transformer.wte.weight is tied to lm_head.weight, so it is not trained either" in said


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["transformer.h.[5-9]"], r"freeze: no parameter of GPT2LMHeadModel matches `transformer\.h\.\[5-9\]`"),
        (["transformer"], "freeze: every parameter of GPT2LMHeadModel matches, so nothing is left to train"),
    ],
)
def test_a_plan_refuses_what_a_run_refuses(patterns: list[str], message: str, new_project: NewProject) -> None:
    recipe = load_recipe(new_project("project", {"freeze": patterns}).recipe).recipe
    with pytest.raises(UsageError, match=message):
        planned(recipe)
