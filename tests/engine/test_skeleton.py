"""Tests configurations that no model can be made of: one error that names the file and says what is wrong with it."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.anatomy import dissect
from fuyou_cli.engine.skeleton import build, load_config

from .families import FAMILIES, VOCABULARY, llama

_LLAMA = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "a"}, r"config\.json: not a model configuration: Field 'hidden_size' expected int, got str"),
        ({"num_attention_heads": 5}, r"config\.json: .*\(32\) is not a multiple of the number of attention heads \(5\)"),
        ({"num_attention_heads": 0}, r"config\.json: not a model configuration: ZeroDivisionError"),
        ({"num_hidden_layers": None}, r"config\.json: .*expected int, got NoneType"),
        ({"dtype": "none"}, r"config\.json: not a model configuration"),
        ({"hidden_size": 1 << 40}, r"config\.json: hidden_size is 1,099,511,627,776: no model has that many"),
        ({"num_hidden_layers": 10**9}, r"config\.json: num_hidden_layers is 1,000,000,000: no model has that many"),
        ({"text_config": {"num_experts": 1e300}}, r"config\.json: num_experts is .*: no model has that many"),
        ({"head_dim": float("nan")}, r"config\.json: head_dim is nan: no model has that many"),
        ({"hidden_size": -32}, "cannot build a causal language model|not a model configuration"),
        ({"vocab_size": 10**299}, r"config\.json: vocab_size is .*: no model has that many"),
        ({"hidden_act": "none"}, "cannot build a causal language model .*'none'"),
        ({"rope_theta": "x"}, "cannot build a causal language model"),
        ({"num_key_value_heads": 3}, "LlamaForCausalLM cannot be streamed"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"config\.json: .* it is quantized with gptq"),
        ({"quantization_config": {"bits": 4}}, "it is quantized with an unnamed method"),
        ({"quantization_config": {"load_in_4bit": True}}, "quantized by bitsandbytes with fp4, not nf4"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "neither load_in_4bit nor load_in_8bit"),
        ({"quantization_config": {"load_in_8bit": True, "llm_int8_skip_modules": [1]}}, "skip_modules is not a list of names"),
    ],
)
def test_refused_in_words(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_LLAMA | changes))
    with pytest.raises(UsageError, match=message) as caught:
        dissect(build(load_config(tmp_path), dtype="float32", attention="sdpa"))
    assert caught.value.hint and "\n" not in caught.value.message


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="the package is here")
def test_an_attention_whose_package_is_absent() -> None:
    with pytest.raises(UsageError, match="flash_attention_2: FlashAttention2") as caught:
        build(llama(), dtype="bfloat16", attention="flash_attention_2")
    assert "sdpa" in (caught.value.hint or "") and "fuyou[flash]" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[]", "is not a JSON object"),
        ('{"model_type": "llama", "model_type": "opt"}', "the key 'model_type' occurs twice"),
        ('{"model_type": ' + "[" * 100_000, "nested too deeply"),
        ('{"model_type": "\\ud800"}', "half of a character"),
        ('{"hidden_size": ' + "3" * 5000 + "}", "a number has 5,000 digits"),
    ],
)
def test_a_configuration_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=rf"config\.json: .*{message}"):
        load_config(tmp_path)


def test_a_configuration_that_is_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UsageError, match=r"config\.json: cannot be read: it is a pipe, not a plain file"):
        load_config(tmp_path)


def test_transformers_has_nothing_to_say_about_the_tests_families() -> None:
    """Scripts import them: a warning came before a script's help."""
    for name, config in FAMILIES.items():
        ids = [getattr(config, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")]
        assert all(one is None or one < VOCABULARY for one in ids), name
