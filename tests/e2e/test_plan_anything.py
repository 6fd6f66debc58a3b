"""Tests `fuyou plan` of a folder that holds config.json and nothing else: no weights, no tokenizer, no data; and that
`fuyou finetune` shows its plan before it fetches and tokenises anything, and again only what has changed since."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from engine.test_configs import CONFIGS

from fuyou_cli.core.errors import UsageError
from fuyou_cli.recipe.load import load_recipe

from .conftest import NewProject, Project
from .running import planned, prepared_run

PLENTY = 1 << 50  # bytes of disk


def _only_a_configuration(new_project: NewProject, tmp_path: Path, name: str, changes: dict[str, Any]) -> Project:
    folder = tmp_path / name
    folder.mkdir()
    shutil.copy(CONFIGS / f"{name}.json", folder / "config.json")
    missing = {"model.name_or_path": str(folder), "dataset.train": [{"path": "no/such.jsonl", "format": "text"}]}
    return new_project(changes={**missing, "dataset.max_seq_len": 512, **changes})


def test_a_dense_model(new_project: NewProject, tmp_path: Path) -> None:
    project = _only_a_configuration(new_project, tmp_path, "llama-3.2-1b", {"offload.max_memory.cpu": "3GiB"})
    shown = project.fuyou_with_free(PLENTY, "plan", "recipe.yaml", "--json", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    plan = json.loads(shown.stdout)
    assert (plan["fits"], plan["trainable"], plan["refusal"]) == (True, True, None)
    assert plan["model"]["parameters"] == plan["model"]["active_parameters"] == 1_235_814_400
    assert "A run would be refused" in shown.stderr  # of the data
    assert not project.out.exists()


def test_a_mixture(new_project: NewProject, tmp_path: Path) -> None:
    project = _only_a_configuration(new_project, tmp_path, "qwen3-30b-a3b", {"offload.max_memory.cpu": "16GiB"})
    shown = project.fuyou_with_free(PLENTY, "plan", "recipe.yaml", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    text = " ".join(shown.stdout.split())
    assert "Qwen3MoeForCausalLM, 30.5 B parameters (3.35 B active per token), 48 blocks" in text
    assert text.startswith("fits: RAM") and "cannot be trained" not in text


def test_a_mixture_that_is_refused(new_project: NewProject, tmp_path: Path) -> None:
    project = _only_a_configuration(new_project, tmp_path, "ernie-4.5-21b-a3b", {"offload.max_memory.cpu": "16GiB"})
    shown = project.fuyou_with_free(PLENTY, "plan", "recipe.yaml", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    text = " ".join(shown.stdout.split())
    assert text.startswith("fits: RAM") and "fuyou finetune" not in text
    assert (
        "choose another model; this one cannot be trained yet: Ernie4_5_MoeForCausalLM cannot be streamed: "
        "model.layers.1.mlp.gate.weight of its router stays float32 whatever the compute dtype" in text
    )


def _mixture(materials: Path, folder: Path) -> Path:
    """The tiny model's folder with another configuration: tokenizer and all."""
    shutil.copytree(materials / "model", folder)
    transformers.MixtralConfig(
        vocab_size=322, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        num_local_experts=4, router_jitter_noise=0.1,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def test_a_run_is_still_refused(new_project: NewProject, materials: Path, tmp_path: Path) -> None:
    project = new_project(changes={"model.name_or_path": str(_mixture(materials, tmp_path / "mixture"))})
    found = planned(load_recipe(project.recipe).recipe)
    with pytest.raises(UsageError) as refused:
        prepared_run(project)
    assert found.refusal == refused.value.message
    assert "router_jitter_noise is above 0" in refused.value.message


def test_a_plan_that_does_not_fit_tells_both(new_project: NewProject, materials: Path, tmp_path: Path) -> None:
    model = str(_mixture(materials, tmp_path / "mixture"))
    project = new_project(changes={"model.name_or_path": model, "offload.max_memory.cpu": "64MiB"})
    found = planned(load_recipe(project.recipe).recipe)
    assert not found.fits_ram and found.refusal is not None and found.refusal.startswith("MixtralForCausalLM")


# ---- nothing is written before a plan ------------------------------------------------------------------------------------


TOKENISING, PLAN = "reading and tokenising the data", "Placement"


def _said(project: Project) -> str:
    done = project.done("finetune", project.recipe)
    return " ".join(done.stderr.split())


def test_the_plan_comes_before_the_data(new_project: NewProject) -> None:
    said = _said(new_project(changes={"train.max_steps": 2, "export.at_end": False}))
    assert said.count(PLAN) == 1 and said.index(PLAN) < said.index(TOKENISING)
    assert "2 steps in" in said[: said.index(TOKENISING)]


def test_what_the_data_decides_is_said_once_it_is_known(new_project: NewProject) -> None:
    epochs = {"train.max_steps": None, "train.epochs": 1, "train.batch_size": 32, "train.micro_batch_size": 16}
    said = _said(new_project(changes={**epochs, "lr_scheduler.warmup_steps": 0, "export.at_end": False}))
    before, after = said.split(TOKENISING)
    assert PLAN in before and PLAN not in after
    assert "1,000 steps write" in before and "2 steps in" not in before
    assert "2 steps in" in after and "the run's 2 steps write" in after


def test_the_plan_of_a_saved_run_comes_once_nothing_refuses_it(stopped: Project) -> None:
    said = _said(stopped)
    assert said.count(PLAN) == 1 and said.index(TOKENISING) < said.index(PLAN) < said.index("resuming after step")
