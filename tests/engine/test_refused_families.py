"""Tests families that cannot be streamed: refused by name before anything is planned, never by what a library raised."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import transformers
from transformers import PreTrainedConfig

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.anatomy import dissect
from fuyou_cli.engine.describe import inspect
from fuyou_cli.engine.skeleton import build

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import models_table

from .families import VOCABULARY, falcon, llama, opt

_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def _with_layerdrop() -> PreTrainedConfig:
    config = opt()
    config.layerdrop = 0.5
    return config


def _gemma4(**changes: int) -> PreTrainedConfig:
    types = ["sliding_attention", "full_attention"] * 2
    sizes = {**_SMALL, "num_hidden_layers": 4, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
    return transformers.Gemma4TextConfig(
        **{**sizes, "layer_types": types, "global_head_dim": 8, "hidden_size_per_layer_input": 0, **changes},
        architectures=["Gemma4ForCausalLM"],
    )


REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "falcon with alibi": (falcon(alibi=True), "differs between rows"),
    "blt": (models_table.small("blt"), "depends on the values of tensors (modeling_blt.py, line "),
    "xglm": (
        transformers.XGLMConfig(
            vocab_size=VOCABULARY, d_model=32, ffn_dim=64, num_layers=2, attention_heads=4, max_position_embeddings=64
        ),
        "Attention mask should be of size",
    ),
    "bert": (transformers.BertConfig(**_SMALL, intermediate_size=64, is_decoder=True), "a block that takes token ids"),
    "rwkv": (
        transformers.RwkvConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, intermediate_size=64
        ),
        "it divides its own weights before it is evaluated",
    ),
    "gemma 4 with an embedding per layer": (_gemma4(hidden_size_per_layer_input=8), "an embedding of every token"),
    "gemma 4 that shares keys": (_gemma4(num_kv_shared_layers=2), "its last 2 blocks take keys and values of earlier blocks"),
    "mixtral whose router jitters": (
        transformers.MixtralConfig(
            **_SMALL, num_key_value_heads=4, intermediate_size=64, num_local_experts=4, router_jitter_noise=0.1
        ),
        "router_jitter_noise is above 0 in its config.json",
    ),
    "ernie 4.5": (models_table.small("ernie4_5_moe"), "mlp.gate.weight of its router stays float32"),
    "jetmoe": (
        models_table.small("jetmoe"),
        "its experts (layers.0.mlp.input_linear) are computed by code of this family alone",
    ),
    "doge with experts": (
        transformers.DogeConfig(**_SMALL, intermediate_size=64, is_moe=True, num_experts=16, num_experts_per_tok=4),
        "its experts (layers.0.mlp) are computed by code of this family alone",
    ),
    "opt with layerdrop": (_with_layerdrop(), "layerdrop is above 0"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_refused_by_name(family: str, caplog: pytest.LogCaptureFixture) -> None:
    config, reason = REFUSED[family]
    with pytest.raises(UsageError) as caught:
        dissect(build(config, dtype="bfloat16", attention="sdpa"))
    name = config.architectures[0] if config.architectures else type(config).__name__.removesuffix("Config")
    assert caught.value.message.startswith(name) and " cannot be streamed: " in caught.value.message
    assert reason in caught.value.message
    hint = caught.value.hint or ""
    assert hint.endswith("scripts/results/MODELS.md lists every family that was tried") and len(hint) < 120
    assert [record for record in caplog.records if record.name.startswith("torch")] == []


@pytest.mark.parametrize("name", ["doge", "nemotron_h", "granitemoehybrid", "jamba"])
def test_dense_models_whose_classes_count_experts_are_not_refused(name: str) -> None:
    config = models_table.made(name, models_table.variants(name)["no experts"])
    assert {stage.kind for stage in dissect(build(config, dtype="bfloat16", attention="sdpa")).stages} >= {"block", "head"}


def test_a_boundary_wider_than_the_compute_is_refused() -> None:
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2)
    with pytest.raises(UsageError, match=r"layers\.1 takes float32, but the model computes in bfloat16") as caught:
        dissect(build(config, dtype="bfloat16", attention="sdpa"))
    assert "residual_in_fp32 to false" in (caught.value.hint or "")
    dissect(build(config, dtype="float32", attention="sdpa"))
    config.residual_in_fp32 = False
    dissect(build(config, dtype="bfloat16", attention="sdpa"))


def test_a_shape_no_tensor_can_have_is_refused_as_well() -> None:
    anatomy = dissect(build(llama(), dtype="float32", attention="eager"))
    with pytest.raises(UsageError, match="LlamaForCausalLM cannot be streamed at micro-batches of 1073741824 x 16777216"):
        inspect(anatomy, dtype="float32", micro_batch_size=1 << 30, max_seq_len=1 << 24, head_chunk_tokens=0)


def test_the_logger_speaks_again_afterwards() -> None:
    dissect(build(llama(), dtype="float32", attention="sdpa"))
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled
