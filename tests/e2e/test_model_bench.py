"""Tests `fuyou bench --model`: real runs of a few blocks of a shape without weights or data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import NewProject, Project

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
    run = project.fuyou("bench", "--model", project.recipe, "--json", *more)
    assert run.returncode == 0, run.stderr
    found: list[dict[str, Any]] = json.loads(run.stdout)["points"]
    return found


def test_a_sweep_of_a_shape_that_has_neither_weights_nor_data(shaped: Project, tmp_path: Path) -> None:
    points = _points(shaped, "--batch", "2,4")
    assert [point["batch_size"] for point in points] == [2, 4]
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
