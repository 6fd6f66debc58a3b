"""Tests `fuyou bench --model`, real runs of a few blocks of a shape without weights or data; and that a machine that nobody has
measured is measured before a run is planned for it, and the layers of a recipe that is new to it, unless told otherwise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fuyou_cli.machine.profile import read_profile, write_profile

from .conftest import HANGS, NewProject, Project, ended

BLOCKS = 6


@pytest.fixture
def shaped(new_project: NewProject, tmp_path: Path) -> Project:
    """Makes a project whose model folder has a configuration alone: neither weights nor a tokenizer nor data."""
    import transformers

    transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=BLOCKS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path / "shape")  # fmt: skip
    return new_project(
        changes={
            "model.name_or_path": str(tmp_path / "shape"),
            "dataset.train": [{"path": "nowhere.jsonl", "format": "text"}],
            "offload.dir": str(tmp_path / "store"),
        }
    )


def _points(project: Project, *more: str | Path) -> list[dict[str, Any]]:
    run = project.done("bench", "--model", project.recipe, "--json", *more)
    found: list[dict[str, Any]] = json.loads(run.stdout)["points"]
    return found


@pytest.mark.parametrize("sizes", [[2], pytest.param([2, 4], marks=pytest.mark.slow)])
def test_a_sweep_of_a_shape_that_has_neither_weights_nor_data(sizes: list[int], shaped: Project, tmp_path: Path) -> None:
    points = _points(shaped, "--batch", ",".join(map(str, sizes)))
    assert [point["batch_size"] for point in points] == sizes
    for point in points:
        assert point["tokens"] == 24 * point["batch_size"]
        assert [one["blocks"] for one in point["estimates"]] == [2, 4]
        for one in point["estimates"]:
            whole = one["measured_seconds"] + (BLOCKS - one["blocks"]) * one["block_seconds"]
            assert one["step_seconds"] == pytest.approx(whole)
            assert 0 < one["blocks"] * one["block_seconds"] < one["measured_seconds"]
        assert point["step_seconds"] == point["estimates"][-1]["step_seconds"]
        assert point["tokens_per_second"] == pytest.approx(point["tokens"] / point["step_seconds"])
        assert point["flops_6n"] == pytest.approx(6 * point["parameters"] * point["tokens_per_second"], rel=1e-3)
        assert point["homes"] == dict.fromkeys(("weights", "optimizer_states", "gradients", "boundaries"), "ssd")
        assert point["agrees"] == (point["apart"] <= 0.05)
        assert 0 < point["busy"]["compute"] <= 1.001
    assert not list((tmp_path / "store").iterdir()), "what a bench wrote is gone"
    assert not shaped.out.exists()


@pytest.mark.slow
def test_text_of_a_model_that_takes_images(new_project: NewProject, tmp_path: Path) -> None:
    import transformers

    small: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
    transformers.Gemma3Config(
        text_config={**small, "num_hidden_layers": BLOCKS, "vocab_size": 512, "num_key_value_heads": 1, "head_dim": 32},
        vision_config={**small, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4,
        image_token_id=511, boi_token_id=510, eoi_token_id=509, architectures=["Gemma3ForConditionalGeneration"],
    ).save_pretrained(tmp_path / "shape")  # fmt: skip
    project = new_project(changes={"model.name_or_path": str(tmp_path / "shape"), "offload.dir": str(tmp_path / "store")})
    (point,) = _points(project, "--batch", "2")
    assert point["tokens"] == 48, point


@pytest.mark.slow  # twenty seconds of a core: what it has of its own, an adapter on nf4, other runs have too
def test_an_adapter_on_quantised_experts(new_project: NewProject, tmp_path: Path) -> None:
    """Of a checkpoint in a format that is only read, with names of files that differ from the model's, and a tied head."""
    import transformers

    transformers.Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=32, tie_word_embeddings=True,
        architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(tmp_path / "shape")  # fmt: skip
    changes = {"model.name_or_path": str(tmp_path / "shape"), "model.quantize": "nf4", "adapter": {"type": "lora", "r": 4}}
    project = new_project(changes={**changes, "offload.dir": str(tmp_path / "store"), "offload.gradients": "auto"})
    (point,) = _points(project, "--batch", "2")
    assert [one["blocks"] for one in point["estimates"]] == [2, 3] and 0 < point["frozen_parameters"] < point["parameters"]


def test_mistakes_are_refused_before_anything_is_measured(shaped: Project, tmp_path: Path) -> None:
    for words, says in (
        (["--batch", "four"], "error: --batch: four is not a list of batch sizes"),
        (["--svg", tmp_path / "chart.svg"], "error: --svg was removed from `fuyou bench`"),
        (["freeze=[model.embed_tokens]"], "a model with frozen parts is not extrapolated from a few blocks"),
        (["--batch", "2", "offload.max_memory.cpu=1MiB"], "error: batch size 2: "),
    ):
        run = shaped.fuyou("bench", "--model", shaped.recipe, *words)
        assert run.returncode in (2, 3) and says in run.stderr, run.stderr
        assert "training" not in run.stderr
    run = shaped.fuyou("finetune", shaped.recipe, "--dry-run", "--trace", tmp_path / "t")
    assert run.returncode == 2 and "--" in run.stderr, run.stderr


# ---- a machine that nobody has measured ----------------------------------------------------------------------------------


# Little of everything, so that measuring for real is quick: it happens in a process of its own, which reads this at its start.
QUICK = """
from fuyou_cli.machine.measure import compute, store_rates, whole
whole.MATMUL_SECONDS, whole.REPEAT_SECONDS, whole.SHARED_WIDTH, whole.SHARED_QUICK_SECONDS = 0.01, 0.1, 256, 0.2
compute.WIDTHS, compute.QUICK_PAIR, compute.QUICK_SECONDS = (256,), 0.05, 0.1
compute.QUICK_RECIPE_PAIR, compute.SECONDS = 0.5, {"block": 0.5, "head": 0.5}
store_rates.QUICK_SPAN = 64 << 20
"""


def _said(project: Project, command: str, *arguments: str) -> str:
    """Returns what a command that ends well says on stderr."""
    hook = project.folder / "hook"
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text(QUICK)
    first = f"import os\nos.environ['PYTHONPATH'] = os.pathsep.join([{str(hook)!r}, os.environ['PYTHONPATH']])"
    done = ended(project.begin(command, project.recipe, *arguments, first=first), within=2 * HANGS)  # it measures
    assert done.returncode == 0, done.stderr
    return done.stderr


def _profile(project: Project) -> Path:
    (path,) = (project.folder / "cache").rglob("profile-*.json")
    return path


@pytest.mark.slow
def test_a_run_measures_its_machine_once(new_project: NewProject) -> None:
    project = new_project()
    project.write_recipe({"offload.measure": True, "checkpoint.resume": "never", "train.max_steps": 3})
    for said_no in ("--assume-rates", "offload.measure=false"):
        assert "measuring" not in _said(project, "finetune", said_no)
    assert not list((project.folder / "cache").rglob("profile-*.json"))
    first = _said(project, "finetune")
    assert "measuring this machine, once" in first and "measured in" in first and "layers" not in first
    assert "measuring this machine, once" not in _said(project, "finetune")  # again, where the first time others were busy


@pytest.mark.slow
def test_the_first_plan_of_a_recipe_measures_its_layers_and_the_second_does_not(new_project: NewProject) -> None:
    """Another recipe for the same machine has other layers, as with an adapter, rows of another length, or float32."""
    pytest.importorskip("peft", reason="peft comes with the extra lora")
    project = new_project()
    project.write_recipe({"offload.measure": True})
    _said(project, "plan")
    before = replace(read_profile(_profile(project)), others_cores=0.0)
    write_profile(before, _profile(project))  # else a loud machine would be measured again once it is idle
    for changes in (["adapter={r: 4}"], ["dataset.max_seq_len=16"]):
        first = _said(project, "plan", *changes)
        assert "this model's layers" in first and "measured in" in first and "this machine" not in first
        assert "measuring" not in _said(project, "plan", *changes)
        assert "measuring" not in _said(project, "plan", *changes, "train.batch_size=2", "train.max_steps=7")
    assert "measuring" not in _said(project, "plan", "offload.measure=false", "precision.compute=float32")
    after = read_profile(_profile(project))
    assert set(before.stage_rates) <= set(after.stage_rates), "those of the first recipe are still there"
    own = [rate for rate in after.stage_rates if rate.layers]
    assert len({rate.layers for rate in own}) == 3 and {rate.kind for rate in own} == {"block", "head"}
    assert all(rate.forward > 0 and rate.backward_flops > rate.forward_flops for rate in own)
