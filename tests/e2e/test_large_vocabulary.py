"""Tests what `auto` makes of a model with a large vocabulary: planned from its configuration, with the recipe's own rules."""

from __future__ import annotations

from typing import Any

import pytest

from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.prepare import Planned

from .conftest import NewProject, Project
from .running import planned


@pytest.fixture
def project(new_project: NewProject) -> Project:
    """Makes a project of Llama-3.2-1B's shape, without weights."""
    import transformers

    project = new_project("large")
    config = transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(project.folder / "llama")
    return project


def _planned(project: Project, **train: Any) -> Planned:
    keys = {f"train.{key}": value for key, value in train.items()}
    memory = keys.pop("train.memory", "1TB")
    project.write_recipe(
        {
            "model.name_or_path": str(project.folder / "llama"), "dataset.max_seq_len": 1024, "train.batch_size": 8,
            "train.micro_batch_size": 1, "offload.max_memory": {"cpu": memory}, **keys,
        }
    )  # fmt: skip
    return planned(load_recipe(project.recipe).recipe)


def _least(project: Project, **train: Any) -> int:
    """Returns the bytes of RAM that the plan of a tiny budget takes."""
    least = _planned(project, memory="100MiB", **train)
    assert not least.fits_ram
    return least.plan.predicted.cpu_peak


def test_auto_cuts_it_and_plans_with_less_than_half_the_memory(project: Project) -> None:
    prepared = _planned(project)
    assert prepared.plan.numerics.vocabulary_rows == 32_064
    assert prepared.plan.numerics.head_chunk_tokens == 512  # of 32,064 columns: 256 MiB of logits and gradients
    assert [stage.name for stage in prepared.model.stages if stage.vocabulary] == [
        f"{name}[{begin}:{begin + 32_064}]" for name in ("embed_tokens", "head") for begin in (0, 32_064, 64_128, 96_192)
    ]
    assert _planned(project, head_chunk_vocab=0).plan.numerics.head_chunk_tokens == 128
    assert _least(project) < 0.5 * _least(project, head_chunk_vocab=0)


def test_the_parameters_are_counted_once(project: Project) -> None:
    whole, cut = (_planned(project, head_chunk_vocab=rows).model for rows in (0, "auto"))
    assert whole.parameters == cut.parameters == 1_235_814_400
    head = 2.0 * 128_256 * 2048 * 1024  # of one micro-batch: logits of every token
    assert sum(stage.forward_flops for stage in cut.stages if stage.kind == "head") == head
