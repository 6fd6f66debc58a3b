"""The bundled text asks every fact in three ways, and the checkpoint is a Llama that any loader takes, the same every time.

Most checks use few layers and a small width, so that they take no time; one counts the full size without weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from fuyou_cli.core.units import MiB
from fuyou_cli.quickstart import toy

ROWS = [json.loads(line) for line in toy.CORPUS.read_text(encoding="utf-8").splitlines()]


def contents(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HIDDEN", 64), ("INTERMEDIATE", 128), ("LAYERS", 2), ("HEADS", 4), ("KV_HEADS", 4)):
        monkeypatch.setattr(toy, name, value)
    monkeypatch.setattr(toy, "SHARD_SIZE", "64KB")


def test_every_fact_is_asked_in_three_ways() -> None:
    """No two islands share a fact, so that an answer is known by heart or wrong."""
    facts = {row["completion"] for row in ROWS}
    assert len({row["prompt"] for row in ROWS}) == len(ROWS) == 3 * len(facts) == 126


@pytest.mark.usefixtures("small")
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        toy.make_model(tmp_path / name, seed=seed)
    first, again, other = (contents(tmp_path / name) for name in "abc")
    assert first == again
    shards = {name for name in first if name.endswith(".safetensors")}
    assert len(shards) > 1
    assert {name for name in first if first[name] != other[name]} == shards
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a", "b", "c"]  # nothing half-made stays


@pytest.mark.usefixtures("small")
def test_a_finished_checkpoint_is_left_alone(tmp_path: Path) -> None:
    toy.make_model(tmp_path / "a", seed=7)
    before = contents(tmp_path / "a")
    toy.make_model(tmp_path / "a", seed=8)
    assert contents(tmp_path / "a") == before


@pytest.mark.usefixtures("small")
def test_transformers_loads_it_with_every_weight(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    toy.make_model(tmp_path / "a", seed=7)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert model.config.eos_token_id == tokenizer.eos_token_id == model.generation_config.eos_token_id
    row = ROWS[0]
    ids = tokenizer(row["prompt"] + row["completion"])["input_ids"]
    assert max(ids) < model.config.vocab_size and len(tokenizer) <= model.config.vocab_size
    assert tokenizer.decode(ids) == row["prompt"] + row["completion"]
    loss = model(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss
    assert loss.item() == pytest.approx(torch.tensor(float(model.config.vocab_size)).log().item(), abs=0.5)


def test_its_training_states_do_not_fit_the_budget() -> None:
    parameters = sum(parameter.numel() for parameter in toy.skeleton(0, 1).parameters())
    assert 1.0 < 16 * parameters / (600 * MiB) < 1.1
