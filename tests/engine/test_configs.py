"""Public models from their configuration alone: every count exact, also of what cannot be trained yet.

`configs/` holds what config.json of each says about shapes; `_source` in each file says where. The truth beside ours is the
model that transformers builds of it on the meta device, and what its makers say that it has.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drawn import every, quick_and_slow
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.process import alive
from fuyou_cli.engine.anatomy import dissect, frozen, outline
from fuyou_cli.engine.describe import Mixture, Outlined, inspect, outlined, specified
from fuyou_cli.engine.skeleton import build
from fuyou_cli.spec.model import ExpertWork, ModelSpec, StageSpec, TensorSpec

from .families import VOCABULARY, llama
from .test_families_stages import REFUSED

CONFIGS = Path(__file__).with_name("configs")
TOKENS = 256
ROUTER, WIDE = "of its router stays float32", "layers.1 takes float32, but the model computes in bfloat16"

# Parameters in billions as published, all and (of mixtures) per token: the model's card on huggingface.co, section "model"
# or "parameters"; of gpt2-xl the name "1558M" in github.com/openai/gpt-2, of gpt-neox-20b table 1 of arXiv 2204.06745.
PUBLISHED: dict[str, tuple[str, str | None, str | None]] = {
    "deepseek-v2-lite": ("15.7", "2.4", None), "deepseek-v3": ("671", "37", None), "ernie-4.5-21b-a3b": ("21", "3", ROUTER),
    "falcon-7b": ("7", None, None), "gemma-2-9b": ("9", None, None), "gemma-3-1b": ("1", None, None),
    "gpt-neox-20b": ("20.55", None, None), "gpt2-xl": ("1.558", None, None), "gpt-oss-120b": ("116.83", "5.13", None),
    "gpt-oss-20b": ("20.91", "3.61", None), "granite-3.1-8b": ("8.1", None, None), "llama-3.1-405b": ("405", None, None),
    "llama-3.1-70b": ("70.6", None, None), "llama-3.1-8b": ("8.03", None, None), "llama-3.2-1b": ("1.23", None, None),
    "mamba-2.8b": ("2.8", None, WIDE), "mistral-7b": ("7.24", None, None), "mixtral-8x7b": ("46.7", "12.9", None),
    "olmo-2-13b": ("13.7", None, None), "opt-13b": ("13", None, None), "phi-3-mini": ("3.8", None, None),
    "phi-4": ("14.7", None, None), "qwen2.5-7b": ("7.61", None, None), "qwen3-14b": ("14.8", None, None),
    "qwen3-30b-a3b": ("30.5", "3.3", None),
}  # fmt: skip
MIXTURES = [name for name, (_, active, _) in PUBLISHED.items() if active is not None]
# In the quick suite: what other tests here describe as well (ERNIE is refused), and a dense model.
OFTEN = ("deepseek-v2-lite", "ernie-4.5-21b-a3b", "mixtral-8x7b", "gemma-3-1b")
NAMES = quick_and_slow(PUBLISHED, lambda number: [*PUBLISHED][number] in OFTEN)


def _config(name: str) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.from_pretrained(CONFIGS / f"{name}.json")
    return config


@cache
def _truth(name: str) -> Counter[torch.dtype]:
    return _elements(_config(name), torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Described:
    model: ModelSpec
    refusal: str | None


def describe(config: PreTrainedConfig, *, dtype: str, rows: int = 1, tokens: int = TOKENS) -> Described:
    known = outlined(build(config, dtype=dtype, attention="sdpa"))
    model = specified(known, dtype=dtype, micro_batch_size=rows, max_seq_len=tokens, head_chunk_tokens=0)
    return Described(model, known.refusal)


@cache
def _described(name: str) -> Described:
    return describe(_config(name), dtype="bfloat16")


def _elements(config: PreTrainedConfig, dtype: torch.dtype) -> Counter[torch.dtype]:
    """Returns elements by dtype of what transformers builds; a tied tensor is there once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    found: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        found[parameter.dtype] += parameter.numel()
    return found


def _near(count: int, published: str) -> bool:
    """Compares within one unit of the last published digit: some round and some cut."""
    unit = 10.0 ** -len(published.partition(".")[2])
    return abs(count / 1e9 - float(published)) < unit


def test_every_file_is_in_the_table() -> None:
    assert {file.stem for file in CONFIGS.glob("*.json")} == set(PUBLISHED)
    assert all(json.loads(file.read_text())["_source"].startswith("https://") for file in CONFIGS.glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_counts(name: str) -> None:
    model, truth = _described(name).model, _truth(name)
    assert model.parameters == truth.total()
    assert _near(model.parameters, PUBLISHED[name][0])
    assert model.float32_parameters == truth[torch.float32]
    # momentum and variance of everything, and what bfloat16 rounded off a float32 master
    assert model.state_bytes == 8 * truth.total() + 2 * truth[torch.bfloat16]


def test_a_family_that_keeps_some_parameters_in_float32() -> None:
    """Counts ERNIE's routers: 64 experts x (2560 + 1 bias) in each of 27 blocks."""
    assert _described("ernie-4.5-21b-a3b").model.float32_parameters == 27 * 64 * 2561
    assert _described("mixtral-8x7b").model.float32_parameters == 0


def test_bytes_in_float32() -> None:
    model = describe(_config("llama-3.2-1b"), dtype="float32", tokens=32).model
    assert model.parameters == _truth("llama-3.2-1b").total()
    assert (model.state_bytes, model.float32_parameters) == (8 * model.parameters, 0)


@pytest.mark.parametrize("name", NAMES)
def test_refusal_and_stages(name: str) -> None:
    described, config = _described(name), _config(name)
    reason = PUBLISHED[name][2]
    if reason is None:
        assert described.refusal is None
    else:
        assert reason in (described.refusal or "")
    kinds = [stage.kind for stage in described.model.stages]
    assert kinds.count("block") == config.get_text_config().num_hidden_layers
    assert kinds[0] == "embedding" and kinds[-1] == "head" and kinds[-2] == "norm"
    assert kinds == sorted(kinds, key=["embedding", "block", "norm", "head"].index)
    owned = [tensor.name for stage in described.model.stages for tensor in stage.tensors]
    assert len(owned) == len(set(owned))
    assert all(stage.backward_peak >= stage.forward_peak > 0 for stage in described.model.stages)
    assert all(0 <= stage.forward_mapped <= stage.forward_peak for stage in described.model.stages)
    assert all(0 <= stage.backward_mapped <= stage.backward_peak for stage in described.model.stages)


# ---- mixtures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", quick_and_slow(MIXTURES, lambda number: MIXTURES[number] in OFTEN))
def test_active_parameters(name: str) -> None:
    model, raw = _described(name).model, json.loads((CONFIGS / f"{name}.json").read_text())
    experts, chosen = _experts(raw)
    routed = (model.parameters - _without_experts(raw)) // experts
    assert model.active_parameters == _without_experts(raw) + chosen * routed
    # some of the published figures leave out the embedding
    published, embedding = PUBLISHED[name][1], raw["vocab_size"] * raw["hidden_size"]
    assert published is not None
    assert _near(model.active_parameters, published) or _near(model.active_parameters - embedding, published)


def _experts(raw: dict[str, Any]) -> tuple[int, int]:
    """Returns how many experts there are, and how many of them a token meets."""
    experts = next(
        raw[key] for key in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") if key in raw
    )
    return experts, raw["moe_k"] if "moe_k" in raw else raw["num_experts_per_tok"]


def _without_experts(raw: dict[str, Any]) -> int:
    """Everything but routed experts, counted from the configuration alone."""
    hidden, blocks, experts = raw["hidden_size"], raw["num_hidden_layers"], _experts(raw)[0]
    dense = raw.get("first_k_dense_replace", raw.get("moe_layer_start_index", 0))
    shared = raw.get("n_shared_experts", raw.get("moe_num_shared_experts", 0))
    shared_width = shared * raw.get("moe_intermediate_size", 0)
    # ERNIE corrects the choice by a trained bias, gpt-oss has one of a plain matrix
    bias = experts if "moe_k" in raw or raw["model_type"] == "gpt_oss" else 0
    sparse = (blocks - dense) * (3 * hidden * shared_width + experts * hidden + bias)
    ends = raw["vocab_size"] * hidden * (1 if raw["tie_word_embeddings"] else 2) + hidden
    return ends + blocks * (_attention(raw) + 2 * hidden) + dense * 3 * hidden * raw["intermediate_size"] + sparse


def _attention(raw: dict[str, Any]) -> int:
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    if "kv_lora_rank" in raw:
        rank, rope, nope, value = (raw[k] for k in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        into, out = hidden * (rank + rope) + rank, rank * heads * (nope + value) + heads * value * hidden
        low = raw["q_lora_rank"]
        query = heads * (rope + nope) * (low or hidden) + (low * hidden + low if low else 0)
        return int(into + out + query)
    size = raw.get("head_dim", hidden // heads)
    of_heads = 2 * size if raw["model_type"] == "qwen3_moe" else 0  # norms of queries and keys
    if raw["model_type"] == "gpt_oss":  # biases of all four matrices, and a sink for each head
        of_heads = hidden + size * (heads + 2 * raw["num_key_value_heads"]) + heads
    return int(2 * hidden * size * (heads + raw["num_key_value_heads"]) + of_heads)


def test_work_of_a_mixture() -> None:
    """Counts Mixtral's block, forward: 2 per active element of a matrix and token; scores and values of half of all pairs of
    tokens. Each expert has a quarter of them."""
    block = next(stage for stage in _described("mixtral-8x7b").model.stages if stage.kind == "block")
    routed = 2 * 3 * 4096 * 14336
    active = 4096 * (2 * 4096 + 2 * 1024) + 8 * 4096 + routed
    assert block.forward_flops == 2 * active * TOKENS + 2 * 4096 * TOKENS**2
    assert block.expert_work == ExpertWork(flops=2 * routed * TOKENS, rows=TOKENS * 2 / 8, products=3 * 8)


def test_work_of_latent_attention() -> None:
    """Counts DeepSeek-V2-Lite's first block, which is dense: queries of 128 + 64 elements, values of 128 that are filled up
    to as many (`engine.attention.attend`), 16 heads."""
    block = next(stage for stage in _described("deepseek-v2-lite").model.stages if stage.kind == "block")
    matrices = sum(tensor.numel for tensor in block.tensors if len(tensor.shape) > 1)
    assert block.forward_flops == 2 * matrices * TOKENS + 16 * 2 * (128 + 64) * TOKENS**2


def test_work_per_token_of_a_frozen_mixture() -> None:
    """Frozen experts that a token is not sent to save no work: it has none there."""
    anatomy = outlined(build(_config("qwen3-30b-a3b"), dtype="bfloat16", attention="sdpa")).anatomy
    known = Outlined(anatomy=frozen(anatomy, ["model.layers.*"]), refusal=None)
    model = specified(known, dtype="bfloat16", micro_batch_size=1, max_seq_len=TOKENS, head_chunk_tokens=0)
    trained = 2 * 151936 * 2048 + 2048  # embedding, head and last norm
    assert model.flops_per_token == 4 * model.active_parameters + 2 * trained > 0
    block = _first(model, "block")
    work = block.expert_work
    assert work is not None and work.frozen_flops == work.flops < block.frozen_flops


@pytest.mark.parametrize("fused", [True, False])
def test_experts_in_a_list_count_as_fused_ones(fused: bool) -> None:
    shapes = {"mlp.experts.gate": (8, 6, 4)} if fused else {f"mlp.experts.{n}.gate": (6, 4) for n in range(8)}
    others = {"mlp.shared_experts.gate": (6, 4), "mlp.gate.weight": (8, 4)}
    tensors = [
        TensorSpec(name=name, shape=shape, offset=0, numel=torch.Size(shape).numel(), decay=True)
        for name, shape in (shapes | others).items()
    ]
    assert Mixture(experts=8, chosen=2).inactive(tensors) == 6 * 24
    assert Mixture(experts=1, chosen=1).inactive(tensors) == 0


# ---- what cannot be traced as it is ----------------------------------------------------------------------------------


UNTRACED = {
    "falcon with alibi", "blt", "xglm", "bert", "gemma 4 with an embedding per layer", "gemma 4 that shares keys", "jetmoe",
}  # fmt: skip


@pytest.mark.parametrize("family", every(3, REFUSED))
def test_what_is_refused_is_described_where_it_can_be_traced(family: str) -> None:
    config = REFUSED[family][0]
    model = build(config, dtype="bfloat16", attention="sdpa")
    with pytest.raises(UsageError) as refused:
        dissect(model)
    if family in UNTRACED:
        with pytest.raises(UsageError) as again:
            describe(config, dtype="bfloat16", rows=2, tokens=4)
        assert again.value.message == refused.value.message
        return
    described = describe(config, dtype="bfloat16", rows=2, tokens=4)
    assert described.refusal == refused.value.message
    assert described.model.parameters == _elements(config, torch.bfloat16).total()
    assert any(stage.kind == "block" and stage.forward_flops > 0 for stage in described.model.stages)


def test_blocks_that_nothing_declares() -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=64)
    with pytest.raises(UsageError, match="no decoder blocks"):
        describe(config, dtype="float32", tokens=16)


def test_a_shape_that_cannot_be_traced() -> None:
    with pytest.raises(UsageError, match="cannot be streamed at micro-batches of 1024 x 281474976710656"):
        describe(llama(), dtype="float32", rows=1 << 10, tokens=1 << 48)  # rows are listed: more of them take gigabytes


def test_recurrent_blocks_are_traced_in_short_rows() -> None:
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, state_size=16)
    anatomy = dissect(build(config, dtype="float32", attention="sdpa"))
    asked = {"dtype": "float32", "micro_batch_size": 2, "max_seq_len": 34, "head_chunk_tokens": 16}
    short, whole = specified(Outlined(anatomy=anatomy, refusal=None), **asked), inspect(anatomy, **asked)  # type: ignore[arg-type]
    assert not any(stage.operators for stage in short.stages)
    for ours, theirs in zip(short.stages, whole.stages, strict=True):
        assert ours.forward_flops == theirs.forward_flops
        assert ours.forward_peak == pytest.approx(theirs.forward_peak, rel=0.05), ours.name
        assert ours.backward_peak == pytest.approx(theirs.backward_peak, rel=0.05), ours.name


def test_logits_are_mapped_and_small_activations_are_not() -> None:
    anatomy = outline(build(_config("llama-3.1-8b"), dtype="bfloat16", attention="sdpa"))
    traced = inspect(anatomy, dtype="bfloat16", micro_batch_size=1, max_seq_len=256, head_chunk_tokens=0)
    head, block = _first(traced, "head"), _first(traced, "block")
    assert head.backward_mapped > 0.9 * head.backward_peak
    # a gradient of 4,096 x 14,336 weights is mapped; nothing of 256 tokens is
    assert (block.forward_mapped, block.backward_mapped) == (0, alive(4096 * 14336 * 2))


def _first(model: ModelSpec, kind: str) -> StageSpec:
    return next(stage for stage in model.stages if stage.kind == kind)


# ---- building --------------------------------------------------------------------------------------------------------


def test_tensors_larger_than_memory_are_never_made() -> None:
    """Describes experts of 96 TiB each: no machine that runs this could make one for real."""
    config = transformers.Llama4TextConfig(
        vocab_size=VOCABULARY, hidden_size=1 << 20, intermediate_size=1 << 20, intermediate_size_mlp=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=24, interleave_moe_layer_step=1,
    )  # fmt: skip
    model = build(config, dtype="bfloat16", attention="sdpa")
    assert sum(parameter.numel() for parameter in model.parameters()) == _elements(config, torch.bfloat16).total()
    assert max(parameter.nbytes for parameter in model.parameters()) == 96 << 40


def test_a_large_buffer_is_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes GPT-Neo's triangle of positions larger than what is taken for a parameter."""
    monkeypatch.setattr("fuyou_cli.engine.skeleton.LARGE", 1024)
    config = transformers.GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=64,
        attention_types=[[["global", "local"], 1]],
    )  # fmt: skip
    model = build(config, dtype="float32", attention="sdpa")
    triangles = [buffer for buffer in model.buffers() if buffer.dim() == 4]
    assert len(triangles) == 2 and all(int(triangle.sum()) > 64 for triangle in triangles)
    assert all(parameter.is_meta for parameter in model.parameters())
