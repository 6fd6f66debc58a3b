"""Tiny configurations of real model families: random weights, two blocks, no dropout unless asked for."""

from __future__ import annotations

import transformers
from transformers import PreTrainedConfig

VOCABULARY = 97

# Ids of a larger vocabulary, which these families have by default, make transformers warn.
_ENDS = {"bos_token_id": 0, "eos_token_id": 0}
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GATED = {**_COMMON, "intermediate_size": 64, "num_key_value_heads": 2}
_WINDOWED = {**_GATED, "head_dim": 8, "sliding_window": 8}
_OPT = {**_COMMON, "ffn_dim": 64, "dropout": 0.0, "attention_dropout": 0.0}


def llama(**changes: object) -> PreTrainedConfig:
    return transformers.LlamaConfig(**{**_GATED, **changes})


def gpt2(dropout: float = 0.0) -> PreTrainedConfig:
    """Makes a GPT-2 with a tied head, learned positions, fused projections, and dropout in four places."""
    return transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64,
        embd_pdrop=dropout, resid_pdrop=dropout, attn_pdrop=dropout, **_ENDS,
    )  # fmt: skip


def gpt_neo() -> PreTrainedConfig:
    """Every other block looks at a window; blocks return attention weights that nobody asked for."""
    return transformers.GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=64, window_size=8,
        attention_types=[[["global", "local"], 1]], intermediate_size=64, embed_dropout=0.0, attention_dropout=0.0,
        resid_dropout=0.0, **_ENDS,
    )  # fmt: skip


def gptj(embd_pdrop: float = 0.0) -> PreTrainedConfig:
    return transformers.GPTJConfig(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4, embd_pdrop=embd_pdrop,
        resid_pdrop=0.0, attn_pdrop=0.0, **_ENDS,
    )  # fmt: skip


def falcon(**changes: object) -> PreTrainedConfig:
    return transformers.FalconConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **changes
    )


def opt(projected_to: int = 32) -> PreTrainedConfig:
    """`projected_to` other than 32 puts a projection before the first block and after the last one."""
    return transformers.OPTConfig(**_OPT, word_embed_proj_dim=projected_to)


FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": llama(), "qwen3": transformers.Qwen3Config(**_GATED, head_dim=8),
    "mistral": transformers.MistralConfig(**_GATED, sliding_window=8), "gemma2": transformers.Gemma2Config(**_WINDOWED),
    "gemma3": transformers.Gemma3TextConfig(**_WINDOWED), "gpt2": gpt2(), "opt": opt(), "gpt_neo": gpt_neo(), "gptj": gptj(),
    "falcon": falcon(),
    "gpt_neox": transformers.GPTNeoXConfig(**_COMMON, intermediate_size=64, attention_dropout=0.0, hidden_dropout=0.0),
    "phi3": transformers.Phi3Config(**_GATED, **_ENDS, pad_token_id=0),
}  # fmt: skip
