"""Tests `fuyou bench --model`: real runs of a shape without weights or data, whole and extrapolated."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

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


@pytest.mark.parametrize("minutes", ["0", pytest.param("10", marks=pytest.mark.slow)])
def test_text_of_a_model_that_takes_images(minutes: str, new_project: NewProject, tmp_path: Path) -> None:
    import transformers

    small: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
    transformers.Gemma3Config(
        text_config={**small, "num_hidden_layers": BLOCKS, "vocab_size": 512, "num_key_value_heads": 1, "head_dim": 32},
        vision_config={**small, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4,
        image_token_id=511, boi_token_id=510, eoi_token_id=509, architectures=["Gemma3ForConditionalGeneration"],
    ).save_pretrained(tmp_path / "shape")  # fmt: skip
    project = new_project(changes={"model.name_or_path": str(tmp_path / "shape"), "offload.dir": str(tmp_path / "store")})
    (point,) = _points(project, "--batch", "2", "--minutes", minutes)
    assert bool(point["extrapolated"]) == (minutes == "0") and point["tokens"] == 48, point


def test_a_sweep_of_whole_runs(shaped: Project, tmp_path: Path) -> None:
    chart = tmp_path / "chart.svg"
    points = _points(shaped, "--batch", "2,4", "--svg", chart)
    assert [point["batch_size"] for point in points] == [2, 4]
    for point in points:
        assert not point["extrapolated"]
        assert point["tokens"] == 24 * point["batch_size"]
        assert point["tokens_per_second"] == pytest.approx(point["tokens"] / point["step_seconds"])
        assert point["flops_6n"] == pytest.approx(6 * point["parameters"] * point["tokens_per_second"])
        assert point["flops_8n"] == pytest.approx(point["flops_6n"] * 8 / 6)
        assert 0 < point["overlap"] < 1
        assert 0 < point["busy"]["compute"] <= 1.001
        assert point["of_in_memory"] > 0
    assert not list((tmp_path / "store").iterdir()), "what a bench wrote is gone"
    assert not shaped.out.exists()
    bars = [one for one in ElementTree.parse(chart).iter() if one.get("class") == "bar"]
    assert len(bars) == 2


def test_samples_of_the_same_homes_give_the_whole(shaped: Project, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    (point,) = _points(shaped, "--batch", "4", "--minutes", "0", "--trace", trace, "offload.device=emulated")
    assert point["extrapolated"] and [one["blocks"] for one in point["estimates"]] == [2, 4]
    for one in point["estimates"]:
        whole = one["measured_seconds"] + (BLOCKS - one["blocks"]) * one["block_seconds"]
        assert one["step_seconds"] == pytest.approx(whole)
        assert one["blocks"] * one["block_seconds"] < one["measured_seconds"]
    assert point["step_seconds"] == point["estimates"][-1]["step_seconds"]
    assert point["homes"] == dict.fromkeys(("weights", "optimizer_states", "gradients", "boundaries"), "ssd")
    assert point["agrees"] == (point["apart"] <= 0.05)
    assert point["in_memory"] is None and point["in_memory_why"]
    blocks = {int(number) for number in re.findall(r"forward layers\.(\d+), micro-batch", trace.read_text())}
    assert blocks == {0, 1, 2, 3}


def test_larger_samples_are_taken_where_time_allows(shaped: Project, tmp_path: Path) -> None:
    """More blocks tell more of the whole."""
    path = tmp_path / "shape" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 4 * BLOCKS}))
    words = ["--batch", "2", "offload.measure=false", "--minutes"]
    (little,) = _points(shaped, *words, "0")
    minutes = 4 * little["predicted_seconds"] / 60  # the whole would take five such steps, and load
    (more,) = _points(shaped, *words, str(minutes))
    assert [[one["blocks"] for one in point["estimates"]] for point in (little, more)] == [[2, 4], [4, 8]]


def test_mistakes_are_refused_before_anything_is_measured(shaped: Project, tmp_path: Path) -> None:
    for words in (["--batch", "four"], ["--svg", tmp_path / "none" / "chart.svg"], ["--trace", tmp_path / "none" / "t"]):
        run = shaped.fuyou("bench", "--model", shaped.recipe, *words)
        assert run.returncode == 2 and "error: --" in run.stderr, run.stderr
        assert "loading" not in run.stderr
    for words in (
        ["bench", "--svg", tmp_path / "chart.svg"],
        ["finetune", shaped.recipe, "--dry-run", "--trace", tmp_path / "t"],
    ):
        run = shaped.fuyou(*words)
        assert run.returncode == 2 and "--" in run.stderr, run.stderr
    run = shaped.fuyou("bench", "--model", shaped.recipe, "--batch", "2", "--minutes", "0", "freeze=[model.embed_tokens]")
    assert run.returncode == 2 and "a model with frozen parts is not extrapolated from a few blocks" in run.stderr, run.stderr
    assert "loading" not in run.stderr


@pytest.mark.parametrize(("name", "billions"), [("8b", 8.03), ("13b", 13.02), ("70b", 70.55), ("175b", 174.6)])
def test_named_shapes_can_be_trained_and_have_their_size(tmp_path: Path, name: str, billions: float) -> None:
    from fuyou_cli.recipe.load import load_recipe
    from fuyou_cli.training.known_model import outline_of
    from fuyou_cli.training.modelbench.synthetic import named_config, write_config, write_recipe

    config = named_config(name)
    recipe = load_recipe(write_recipe(tmp_path), []).recipe
    outline = outline_of(recipe, write_config(config, tmp_path, blocks=config.num_hidden_layers), strict=True)
    parameters = sum(parameter.numel() for parameter in outline.anatomy.model.parameters())
    assert parameters / 1e9 == pytest.approx(billions, rel=1e-3)
