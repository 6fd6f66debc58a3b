"""The bundled text is what its script prints, and the checkpoint is a Llama that any loader takes, the same every time.

Most checks use few layers and a small width, so that they take no time; one counts the full size without weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from fuyou_cli.core.units import GiB
from fuyou_cli.training.quickstart import make_corpus, make_model

PACKAGE = Path(make_corpus.__file__).parent


def contents(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HIDDEN", 64), ("INTERMEDIATE", 128), ("LAYERS", 2), ("HEADS", 4), ("KV_HEADS", 4)):
        monkeypatch.setattr(make_model, name, value)
    monkeypatch.setattr(make_model, "SHARD_BYTES", 64 << 10)


def test_the_committed_text_is_the_scripts() -> None:
    text = (PACKAGE / "corpus.jsonl").read_text(encoding="utf-8")
    assert text == make_corpus.corpus_text()
    rows = [json.loads(line) for line in text.splitlines()]
    facts = {row["completion"] for row in rows}
    assert len(facts) == len(make_corpus.ISLANDS) * len(make_corpus.ASPECTS)
    assert len({row["prompt"] for row in rows}) == len(rows) == 3 * len(facts)


def test_no_two_islands_share_a_fact() -> None:
    for number, aspect in enumerate(make_corpus.ASPECTS):
        values = [facts[number] for facts in make_corpus.ISLANDS.values()]
        assert len(set(values)) == len(values), aspect


@pytest.mark.usefixtures("small")
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        make_model.make_checkpoint(tmp_path / name, seed=seed)
    first, again, other = (contents(tmp_path / name) for name in "abc")
    assert first == again
    shards = {name for name in first if name.endswith(".safetensors")}
    assert len(shards) > 1
    assert {name for name in first if first[name] != other[name]} == shards
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a", "b", "c"]  # nothing half-made stays


@pytest.mark.usefixtures("small")
def test_a_finished_checkpoint_is_left_alone(tmp_path: Path) -> None:
    make_model.make_checkpoint(tmp_path / "a", seed=7)
    before = contents(tmp_path / "a")
    make_model.make_checkpoint(tmp_path / "a", seed=8)
    assert contents(tmp_path / "a") == before


@pytest.mark.usefixtures("small")
def test_transformers_loads_it_with_every_weight(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_model.make_checkpoint(tmp_path / "a", seed=7)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert model.config.eos_token_id == tokenizer.eos_token_id == model.generation_config.eos_token_id
    row = next(iter(make_corpus.corpus_rows()))
    ids = tokenizer(row["prompt"] + row["completion"])["input_ids"]
    assert max(ids) < model.config.vocab_size and len(tokenizer) <= model.config.vocab_size
    assert tokenizer.decode(ids) == row["prompt"] + row["completion"]
    loss = model(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss
    assert loss.item() == pytest.approx(torch.tensor(float(model.config.vocab_size)).log().item(), abs=0.5)


def test_its_training_states_do_not_fit_the_budget() -> None:
    shapes = make_model._shapes(make_model._config(0, 1))
    parameters = 0
    for shape in shapes.values():
        size = 1
        for extent in shape:
            size *= extent
        parameters += size
    assert 1.5 <= 16 * parameters / GiB <= 1.7
