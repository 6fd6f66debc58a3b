"""Tests configurations that no model can be made of: one error that names the file and says what is wrong with it."""

from __future__ import annotations

import json
import os
from collections import deque
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.anatomy import dissect
from fuyou_cli.engine.calls import ModuleState, check_no_fakes, tracing
from fuyou_cli.engine.describe import inspect
from fuyou_cli.engine.forward_only import room
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
        ("", "not valid JSON"), ("[]", "is not a JSON object"),
        ('{"model_type": "llama", "model_type": "opt"}', "the key 'model_type' occurs twice"),
        ('{"model_type": ' + "[" * 100_000, "nested too deeply"), ('{"model_type": "\\ud800"}', "half of a character"),
        ('{"hidden_size": ' + "3" * 5000 + "}", "a number has 5,000 digits"),
    ],
)  # fmt: skip
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


# ---- what modules keep ---------------------------------------------------------------------------------------------


_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 2.5, 3.0]}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


class _Keeps(nn.Module):
    """Remembers its inputs in every way that a module may."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []
        self.recent: deque[torch.Tensor] = deque(maxlen=2)
        self.by_length: dict[int, Any] = {}
        self.inside, self.calls, self.last = SimpleNamespace(longest=None), 0, (None,)
        self.register_buffer("longest", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x)
        self.recent.append(x)
        self.by_length[x.shape[0]] = {"x": [x]}
        self.inside.longest, self.last, self.new = x, (x,), x  # type: ignore[assignment]
        self.calls += 1
        self.register_buffer("longest", x, persistent=False)
        return x


def _assert_as_made(keeps: _Keeps) -> None:
    check_no_fakes(keeps)
    assert (keeps.seen, keeps.by_length, keeps.inside.longest, keeps.last, keeps.calls) == ([], {}, None, (None,), 0)
    assert not keeps.recent
    assert keeps.longest.tolist() == [0, 0] and not hasattr(keeps, "new")


def test_a_trace_leaves_nothing_behind() -> None:
    keeps = _Keeps()
    with tracing(keeps):
        keeps(torch.ones(4))
        with pytest.raises(UsageError, match=r"a tensor of an inspection in _Keeps\.longest"):
            check_no_fakes(keeps)
    _assert_as_made(keeps)


def test_an_ended_trace_leaves_nothing_behind_either() -> None:
    keeps = _Keeps()
    with pytest.raises(ZeroDivisionError), tracing(keeps):
        keeps(torch.ones(4))
        raise ZeroDivisionError
    _assert_as_made(keeps)


def test_what_cannot_be_put_back_is_refused_by_name() -> None:
    layer = nn.Linear(2, 2)
    layer.config = PreTrainedConfig()  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"keeps a tensor of an inspection in Linear\.config\.cosines"), tracing(layer):
        layer.config.cosines = torch.ones(2)


def test_modules_are_put_back_as_loaded() -> None:
    keeps = _Keeps()
    state = ModuleState(keeps)
    assert state.put_back() == []
    keeps(torch.ones(4))
    names = ("seen", "recent", "by_length.4", "inside.longest", "last", "new", "calls", "longest")
    assert sorted(state.put_back()) == sorted(f"_Keeps.{name}" for name in names)
    _assert_as_made(keeps)


def test_what_is_written_in_place_is_undone_or_refused() -> None:
    keeps = _Keeps()
    state = ModuleState(keeps)
    keeps.longest.fill_(3)
    assert state.put_back() == ["_Keeps.longest"] and keeps.longest.tolist() == [0, 0]
    keeps.longest.fill_(4)
    assert state.put_back() == ["_Keeps.longest"] and keeps.longest.tolist() == [0, 0]
    keeps.table = torch.zeros(1 << 20)
    state = ModuleState(keeps)
    keeps.table[0] = 1
    with pytest.raises(UsageError, match=r"_Keeps\.table: a forward writes into this tensor"):
        state.put_back()


def test_parameters_and_the_mode_are_left_alone() -> None:
    layer = nn.Linear(2, 2)
    state = ModuleState(layer)
    layer.weight = nn.Parameter(torch.ones(2, 2))
    layer.eval()
    assert state.put_back() == [] and layer.weight.sum() == 4 and not layer.training


def _phi3(**changes: Any) -> PreTrainedConfig:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97}
    ends = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.Phi3Config(
        **sizes, **ends, intermediate_size=64, max_position_embeddings=64, original_max_position_embeddings=16,
        rope_parameters=dict(_LONG), **changes,
    )  # fmt: skip


ROTATED = {"longrope": _phi3(), "dynamic": llama(rope_parameters=dict(_DYNAMIC), max_position_embeddings=16)}


def _cosines(model: Any, tokens: int) -> torch.Tensor:
    found: torch.Tensor = model.base_model.rotary_emb(torch.zeros(1), torch.arange(tokens).unsqueeze(0))[0]
    return found


@pytest.mark.parametrize("name", ROTATED)
def test_positions_after_traces_are_those_of_a_fresh_model(name: str) -> None:
    """Rows shorter and longer than the length that the configuration names, each after traces of both."""
    model = build(ROTATED[name], dtype="float32", attention="sdpa")
    state = ModuleState(model)
    anatomy = dissect(model)
    for tokens in (8, 40):
        inspect(anatomy, dtype="float32", micro_batch_size=1, max_seq_len=tokens, head_chunk_tokens=0)
        room(model, rows=1, prompt=4, new=tokens)
    for tokens in (40, 8, 40, 24, 12):
        fresh = _cosines(build(ROTATED[name], dtype="float32", attention="sdpa"), tokens)
        assert torch.equal(_cosines(model, tokens), fresh), tokens
        state.put_back()
    assert not torch.equal(_cosines(model, 40)[:, :8], _cosines(build(ROTATED[name], dtype="float32", attention="sdpa"), 8))
