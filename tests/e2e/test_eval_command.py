"""Tests `fuyou eval`: the losses of transformers with the whole model in memory, of a model, a store and a run's output
folder."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from .conftest import NewProject, Whole
from .running import exported, prepared_run
from .test_evaluation import EXACT, in_memory, with_sets


def test_a_model_a_store_and_an_output_folder(new_project: NewProject, whole: Callable[..., Whole], tmp_path: Path) -> None:
    changes = {**EXACT, "dataset.eval_fraction": 0.1}
    project, store = new_project(changes=changes), whole(EXACT).store
    with_sets(project, changes)
    model, out = project.materials / "model", tmp_path / "trained"
    exported(store, out / "model")
    ready = prepared_run(project)
    for source, weights in ((model, model), (store, out / "model"), (out, out / "model")):
        done = project.fuyou("eval", source, project.recipe, "--json")
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert [one["name"] for one in said["sets"]] == ["held-out", "one", "held-back"]
        for one in said["sets"]:
            assert one["loss"] == pytest.approx(in_memory(weights, ready, one["name"]), rel=1e-6), source
        assert said["memory"]["peak"] < said["memory"]["budget"] and said["passes"] == 3
    assert not project.out.exists() or not list(project.out.glob("store*"))


def test_a_run_told_the_same(new_project: NewProject) -> None:
    """Gives with `fuyou eval` on a run's output folder the loss that the run ended with."""
    project = new_project(changes=EXACT)
    with_sets(project, EXACT)
    ran = project.fuyou("finetune", project.recipe)
    assert ran.returncode == 0, ran.stderr
    records = [json.loads(line) for line in (project.out / "log.jsonl").read_text().splitlines()]
    last = {record["name"]: record["loss"] for record in records if record["event"] == "eval"}
    done = project.fuyou("eval", project.out, project.recipe)
    assert done.returncode == 0, done.stderr
    for name, loss in last.items():
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(f"{name}  loss "))
        assert float(line.split()[2]) == pytest.approx(loss, rel=1e-5)
    assert "bytes per parameter and pass" in done.stderr
    said = json.loads(project.fuyou("plan", project.recipe, "--json", "checkpoint.resume=never").stdout)["evaluation"]
    assert (said["rows"], said["passes"], said["times"]) == (8, 3, 4) and said["seconds"] == 3 * said["pass_seconds"] > 0


def test_mistakes(new_project: NewProject, tmp_path: Path) -> None:
    project = new_project()
    model = project.materials / "model"
    nothing = project.fuyou("eval", model, project.recipe)
    assert nothing.returncode == 2 and "the recipe has nothing to evaluate" in nothing.stderr
    little = project.fuyou("eval", model, project.recipe, "dataset.eval_fraction=0.1", "offload.max_memory.cpu=1MiB")
    assert little.returncode == 3 and "the evaluation needs " in little.stderr
    missing = project.fuyou("eval", tmp_path, project.recipe, "dataset.eval_fraction=0.1")
    assert missing.returncode == 2 and "config.json" in missing.stderr
    confused = project.fuyou("eval", project.recipe, project.recipe)
    assert confused.returncode == 2 and "is a recipe, not a model" in confused.stderr
    if not torch.cuda.is_available():
        without = project.fuyou("eval", model, project.recipe, "dataset.eval_fraction=0.1", "offload.device=cuda")
        assert without.returncode == 2 and "finds no CUDA device" in without.stderr


def test_a_model_of_nan_is_told_in_valid_json(new_project: NewProject, tmp_path: Path) -> None:
    project, folder = new_project(), tmp_path / "model"
    shutil.copytree(project.materials / "model", folder)
    (file,) = folder.glob("*.safetensors")
    weights = {name: tensor.fill_(math.nan) for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    done = project.fuyou("eval", folder, project.recipe, "dataset.eval_fraction=0.5", "--json")
    assert done.returncode == 0, done.stderr
    (told,) = json.loads(done.stdout, parse_constant=pytest.fail)["sets"]
    assert told["loss"] is None and told["perplexity"] is None
