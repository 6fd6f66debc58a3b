"""Tests scripts/make_checkpoint.py: a complete model directory, the same bytes for the same arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from fuyou_cli.checkpoint.files import open_checkpoint

from .tiny_models import assert_same_bits, loaded, matched_entries, read_all

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_checkpoint.py"
TEXT = "Every step moves the weights a little, and the little steps add up. Größe 23 µm!\n" * 50


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True, cwd=SCRIPT.parent
    )


def make(directory: Path, *arguments: object) -> dict[str, torch.Tensor]:
    finished = run("--shape", "1m", "--out", directory, *arguments)
    assert finished.returncode == 0, finished.stderr
    return read_all(open_checkpoint(directory).entries)


def test_is_a_complete_model_directory(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"prompt": line, "rest": [line]}) + "\n" for line in TEXT.splitlines()))
    tensors = make(tmp_path / "out", "--shard-size", "500KB", "--tokenizer-text", text)
    model = loaded(tmp_path / "out", torch.bfloat16)
    assert_same_bits(tensors, model.state_dict())
    assert matched_entries(tmp_path / "out").keys() == model.state_dict().keys()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer) <= 4096
    for sentence in (TEXT.splitlines()[0], "unseen: zebra 日本\t x", " "):
        assert tokenizer.decode(tokenizer(sentence)["input_ids"]) == sentence
    assert len(tokenizer(TEXT.splitlines()[0])["input_ids"]) < 30  # it has learnt words, not only bytes
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (model.config.eos_token_id, model.config.pad_token_id)
    assert model(torch.tensor([tokenizer("every step")["input_ids"]])).logits.isfinite().all()


def test_bytes_depend_on_the_seed_alone(tmp_path: Path) -> None:
    narrow = make(tmp_path / "narrow")
    wide = make(tmp_path / "wide", "--dtype", "float32", "--shard-size", "1MB")
    assert_same_bits({name: wide[name].bfloat16() for name in narrow}, narrow)
    other = make(tmp_path / "other", "--seed", 1)
    name = "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(other[name], narrow[name])
    assert not torch.equal(wide[name].reshape(-1), wide["model.layers.0.mlp.up_proj.weight"].reshape(-1))


def test_distribution(tmp_path: Path) -> None:
    for name, tensor in make(tmp_path / "out", "--dtype", "float32").items():
        if "norm" in name:
            assert bool((tensor == 1).all())
        else:  # five standard errors of mean and deviation
            slack = 5 * 0.02 / tensor.numel() ** 0.5
            assert abs(tensor.mean().item()) < slack and abs(tensor.std().item() - 0.02) < slack


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--shape", "7b", "--out", "x"), "invalid choice"),
        (("--shape", "1m", "--out", "x", "--shard-size", "many"), "shard-size"),
        (("--shape", "1m", "--out", "x", "--tokenizer-text", "/absent"), "/absent"),
        (("--shape", "1m", "--out", "."), "did not write"),
    ],
)
def test_refuses_with_a_message(arguments: tuple[str, ...], says: str) -> None:
    finished = run(*arguments)
    assert finished.returncode == 2
    assert says in finished.stderr and "Traceback" not in finished.stderr
