#!/usr/bin/env python3
"""Writes scripts/results/MODELS.md: every causal decoder family of the installed transformers, and some that take images,
built small from its configuration class and tried.

    python scripts/models_table.py [--print]
    needs no weights and no network; a minute

`tests/engine/test_every_family.py` trains a step of those that train, beside plain PyTorch, and compares this table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.describe import outlined, specified
from fuyou_cli.engine.skeleton import build

TABLE = Path(__file__).with_name("results") / "MODELS.md"
VOCABULARY, TOKENS = 97, 16
_LONGEST = 110  # characters of a reason
_SMALL: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "inner_dim", "d_ff"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 64),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    **dict.fromkeys(("sliding_window", "window_size", "head_dim", "hidden_size_per_layer_input"), 8),
    "vocab_size": VOCABULARY, "rotary_dim": 4, "depth": 1, "embed_dim": 32,
}  # fmt: skip
_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")
_MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1]}
_SPECIAL: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_moe": {"num_experts": 4},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "falcon_mamba": {"residual_in_fp32": False},
    "mamba": {"residual_in_fp32": False},
    "mamba2": {"num_heads": 8, "n_groups": 2, "residual_in_fp32": False},
    "qwen2_vl": {"rope_parameters": _MROPE},
    "qwen2_5_vl": {"rope_parameters": _MROPE},
    "glm4v": {"rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
    "gemma3n_text": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0]},
    "gemma4": {"hidden_size_per_layer_input": 0},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
}
_OTHERS = {  # settings of other checkpoints, as of E2B and E4B
    **{name: {"hidden_size_per_layer_input": 8} for name in ("gemma4", "gemma4_text")},
    **{name: {"residual_in_fp32": True} for name in ("falcon_mamba", "mamba", "mamba2")},
}
_ASIDE = {  # no language models by themselves, or encoders that can be asked to be causal
    "encoders that may be causal": (
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod xlm"
    ),
    "decoders of an encoder": (
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr whisper"
    ),
}
_IMAGES = "glm4v internvl llava llava_next llava_onevision mistral3 paligemma qwen2_5_vl qwen2_vl qwen3_vl smolvlm"
_CLASSES = {  # of families without a causal class of their own, some that take images: their text is trained
    **{name: kind for name, kind in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items() if f" {name} " in f" {_IMAGES} "},
    **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
}
LEFT_OUT = {name: why for why, names in _ASIDE.items() for name in names.split()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Holds one family of the table, and what became of it."""

    name: str  # transformers' model_type
    model: str  # its class
    trains: str  # yes, no, not tried
    isolated: str  # `dataset.packing: isolated`; empty if it does not train
    why: str  # it does not train

    @property
    def row(self) -> str:
        return f"| `{self.name}` | {self.model} | {self.trains} | {self.isolated} | {self.why} |"


def names() -> list[str]:
    """Lists the families of decoders that transformers can make by themselves."""
    return sorted(set(_CLASSES) & set(CONFIG_MAPPING) - set(LEFT_OUT))


def small(name: str, changes: Mapping[str, Any] = MappingProxyType({})) -> PreTrainedConfig:
    """Returns a family's default configuration, made small and without dropout. `changes`: of the part for text."""
    usual, special = CONFIG_MAPPING[name](), {**_SPECIAL.get(name, {}), **changes}
    text = usual.get_text_config()
    if text is usual:
        return type(usual)(**_small(usual, special))
    parts = {key: part for key, part in vars(usual).items() if isinstance(part, PreTrainedConfig)}
    inner = {key: type(part)(**_small(part, special if part is text else {})) for key, part in parts.items()}
    return type(usual)(**inner, **{key: VOCABULARY - 1 for key in vars(usual) if key.endswith(_PLACEHOLDERS)})


def _small(part: PreTrainedConfig, special: dict[str, Any]) -> dict[str, Any]:
    """Returns the changes that make one part of a configuration small."""
    fields = part.to_dict()
    chosen: dict[str, Any] = {key: size for key, size in _SMALL.items() if key in fields}
    chosen |= {key: 0.0 for key in fields if key.endswith(("dropout", "pdrop", "dropout_rate", "dropout_prob", "layerdrop"))}
    if "kv_lora_rank" in fields:  # latent attention: as many keys as queries, and head sizes of its own
        chosen = {key: size for key, size in chosen.items() if key != "head_dim"} | {"num_key_value_heads": 4}
    return chosen | special


def tried(name: str) -> Family:
    """Builds a family's model small and asks whether it trains, and whether it keeps documents of a row apart."""
    model = str(_CLASSES[name])
    try:
        config = small(name)
        why = _refusal(config)
        other = "" if name not in _OTHERS else _refusal(small(name, _OTHERS[name]))
    except Exception as error:  # whatever a family's code says of sizes that it does not take
        return Family(name=name, model=model, trains="not tried", isolated="", why=f"not made small: {_short(str(error))}")
    why, other = (reason.removeprefix(f"{model} cannot be streamed: ") for reason in (why, other))
    if why:
        return Family(name=name, model=model, trains="no", isolated="", why=_short(why))
    told = f"not all of its checkpoints: {_short(other)}" if other else ""
    return Family(name=name, model=model, trains="yes", isolated="yes" if _isolated(config) else "no", why=told)


def _refusal(config: PreTrainedConfig) -> str:
    """Says why a model does not train; empty for one that does."""
    made = build(config, dtype="bfloat16", attention="sdpa")
    try:
        known = outlined(made)
        if known.refusal is None:
            specified(known, dtype="bfloat16", micro_batch_size=2, max_seq_len=TOKENS, head_chunk_tokens=0)
    except UsageError as error:
        return error.message
    return known.refusal or ""


def _isolated(config: PreTrainedConfig) -> bool:
    try:
        outlined(build(config, dtype="float32", attention="sdpa"), strict=True, isolated=True)
    except UsageError:
        return False
    return True


def _short(reason: str) -> str:
    """Returns the first words of a reason, on one line."""
    words = " ".join(reason.split()).replace("|", "/")
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]} ..."


def table(families: list[Family]) -> Iterator[str]:
    yield "# Families of models\n"
    yield (
        f"Every causal decoder family of transformers {transformers.__version__}, and some that take images, built small from "
        "its\nconfiguration class: whether fuyou trains it, and whether `dataset.packing: isolated` keeps documents of a row\n"
        "apart. A family that does not train is planned from an estimate where its stages can be found. Written by\n"
        "`scripts/models_table.py`; `tests/engine/test_every_family.py` trains a step of each beside plain PyTorch.\n"
    )
    yield "| family | class | trains | isolated | why not |\n| --- | --- | --- | --- | --- |"
    yield from (family.row for family in families)
    yield f"\n{sum(family.trains == 'yes' for family in families)} of {len(families)} train. Left out: " + "; ".join(
        f"{why} ({names.replace(' ', ', ')})" for why, names in _ASIDE.items()
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="to the terminal instead")
    asked = parser.parse_args(words)
    text = "\n".join(table([tried(name) for name in names()])) + "\n"
    if asked.print:
        print(text, end="")
    else:
        TABLE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
