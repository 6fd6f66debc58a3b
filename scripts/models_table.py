#!/usr/bin/env python3
"""Writes scripts/results/MODELS.md: every causal decoder family of the installed transformers, and some that take images,
built small from its configuration class, in several ways, written by transformers and tried.

    python scripts/models_table.py [--print]
    needs no network; ten minutes

`tests/engine/test_every_family.py` compares this table; `tests/e2e/test_families_from_files.py` trains two steps of those that
train, beside plain PyTorch.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from fuyou_cli.checkpoint.files import open_checkpoint
from fuyou_cli.checkpoint.names import entries_for
from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.describe import outlined, specified
from fuyou_cli.engine.skeleton import EXPERT_KEYS, auto_class, build, load_config

TABLE = Path(__file__).with_name("results") / "MODELS.md"
VOCABULARY, TOKENS = 97, 16
_LONGEST = 110  # characters of a reason
_AT_ONCE = 4  # families that one process tries: all of them in one ran out of 24 GB
_SMALL: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "inner_dim", "d_ff"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 32),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size"), 8),
    **dict.fromkeys(("head_dim", "hidden_size_per_layer_input", "chunk_size", "mamba_chunk_size", "attention_chunk_size"), 8),
    "vocab_size": VOCABULARY, "rotary_dim": 4, "depth": 1, "embed_dim": 32, "base_channels": 32, "codebook_size": 64,
}  # fmt: skip
_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")
_MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1]}
_PART = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64,
    "head_dim": 8,
}  # fmt: skip
_SPECIAL: dict[str, dict[str, Any]] = {
    "blt": {  # whose parts would be as large as they are by default
        "encoder_hash_byte_group_vocab": 64,
        "patcher_config": _PART,
        "global_config": _PART,
        **{key: {**_PART, "hidden_size_global": 32} for key in ("encoder_config", "decoder_config")},
    },
    "zaya": {"num_experts": 16, "num_experts_per_tok": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    **{name: {"layers_block_type": ["linear_attention", "hybrid"]} for name in ("zamba", "zamba2")},
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
_OTHERS = {  # settings of other checkpoints
    **{name: {"as E2B and E4B": {"hidden_size_per_layer_input": 8}} for name in ("gemma4", "gemma4_text")},
    **{name: {"residual_in_fp32": {"residual_in_fp32": True}} for name in ("falcon_mamba", "mamba", "mamba2")},
    "doge": {"experts": {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 4}},
    "mpt": {"no alibi": {"attn_config": {"alibi": False}}},
}
_KINDS_KEYS = ("layer_types", "layers_block_type", "block_types")
_MORE_KINDS = {"lfm2": ["conv", "full_attention"], "lfm2_moe": ["conv", "full_attention"]}
_WITH_EXPERTS = ("moe", "sparse", "hash_moe")  # kinds of a layer, or of its second half
_EXPERTS_OFF = {  # of all layers, where a configuration has the key
    "first_k_dense_replace": 9, "num_dense_layers": 9, "moe_layers": [], "mlp_only_layers": list(range(9)),
    "moe_layer_start_index": 9, "is_moe": False,
}  # fmt: skip
_EXPERTS_ON = {  # in all layers, where a configuration has the key
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 0), "mlp_only_layers": [],
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
}  # fmt: skip
ORIGINAL = 16  # tokens: rope types change at this length
_ROPE: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL,
    },
}  # fmt: skip
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
    "emu3": "Emu3ForConditionalGeneration",  # whose files name the whole model
}
LEFT_OUT = {name: why for why, names in _ASIDE.items() for name in names.split()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Holds one family of the table, and what became of it."""

    name: str  # transformers' model_type
    model: str  # its class
    trains: str  # yes, some (not as it usually is), no, not tried
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
    if name == "emu3":
        inner |= {"architectures": [_CLASSES[name]], "vocabulary_map": {"<image>": VOCABULARY - 2}}
    return type(usual)(**inner, **{key: VOCABULARY - 1 for key in vars(usual) if key.endswith(_PLACEHOLDERS)})


def _small(part: PreTrainedConfig, special: dict[str, Any]) -> dict[str, Any]:
    """Returns the changes that make one part of a configuration small."""
    fields = part.to_dict()
    unknown = [key for key in special if not hasattr(part, key)]
    assert not unknown, f"{type(part).__name__} does not have {unknown}: a variant would be the usual model once more"
    chosen: dict[str, Any] = {key: size for key, size in _SMALL.items() if key in fields}
    chosen |= {key: 0.0 for key in fields if key.endswith(("dropout", "pdrop", "dropout_rate", "dropout_prob", "layerdrop"))}
    chosen |= {key: 4 for key in EXPERT_KEYS if isinstance(fields.get(key), int) and fields[key] > 1}
    chosen |= {key: usual for key, usual in _EXPERTS_ON.items() if key in fields}
    if "sparse" in (kinds := fields.get("mlp_layer_types") or ()):
        chosen["mlp_layer_types"] = [kinds[-1]] * 2
    if "kv_lora_rank" in fields:  # latent attention: as many keys as queries, and head sizes of its own
        chosen = {key: size for key, size in chosen.items() if key != "head_dim"} | {"num_key_value_heads": 4}
    return chosen | special


@cache
def variants(name: str) -> dict[str, dict[str, Any]]:
    """Returns changes of a family's small configuration, by what they are about. The first has none."""
    fields, found = small(name).get_text_config().to_dict(), dict[str, dict[str, Any]]()
    off = _without_experts(fields)
    fields |= off
    for key in (key for key in _KINDS_KEYS if key in fields):
        usual = getattr(CONFIG_MAPPING[name]().get_text_config(), key, None) or ()
        kinds = [kind for kind in dict.fromkeys([*usual, *_MORE_KINDS.get(name, [])]) if kind not in _WITH_EXPERTS]
        if len(kinds) > 1:
            found["every kind of layer"] = _layers(fields, key, kinds)
    if "sliding_window" in fields:
        window: dict[str, Any] = {
            "sliding_window": 8,
            **({"use_sliding_window": True} if "use_sliding_window" in fields else {}),
        }
        if set(fields.get("layer_types") or ()) == {"full_attention"}:
            window |= _layers(fields, "layer_types", ["sliding_attention", "full_attention"])
        found["a window"] = window
        if "sliding_attention" not in (fields.get("layer_types") or ()):
            found["no window"] = {"sliding_window": None}
    if "alibi" in fields:
        found["alibi"] = {"alibi": not fields["alibi"]}
    if fields.get("rope_parameters"):
        found |= {f"rope {kind}": _rope(fields, kind) for kind in _ROPE}
    without = {"no experts": off} if off else {}
    return {"usual": {}, **without, **{label: {**off, **changes} for label, changes in found.items()}, **_OTHERS.get(name, {})}


def _layers(fields: Mapping[str, Any], key: str, kinds: Sequence[str]) -> dict[str, Any]:
    """Returns changes that give a model a layer of each kind. Further lists by layer are as long."""
    changes: dict[str, Any] = {key: list(kinds), "num_hidden_layers": len(kinds)}
    if fields.get("mlp_layer_types"):
        changes["mlp_layer_types"] = [fields["mlp_layer_types"][0]] * len(kinds)
    return changes


def _without_experts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns changes that leave a family's experts out, in every way that its configuration may have; empty for others."""
    if not any(isinstance(fields.get(key), int) and fields[key] > 1 for key in (*EXPERT_KEYS, "num_local_experts")):
        return {}
    off = {key: value for key, value in _EXPERTS_OFF.items() if key in fields}
    if fields.get("mlp_layer_types"):
        off["mlp_layer_types"] = ["dense"] * len(fields["mlp_layer_types"])
    if "moe" in (fields.get("layers_block_type") or ()):
        off["layers_block_type"] = ["linear_attention", "full_attention", "mlp"]
    return off or {key: 0 if key == "num_local_experts" else 1 for key in EXPERT_KEYS if key in fields}


def _rope(fields: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Returns changes to another rotary type, also where each type of layer has its own."""

    def of(usual: Any) -> Any:
        if not isinstance(usual, dict):
            return usual
        if any(isinstance(part, dict) for part in usual.values()):
            return {key: of(part) for key, part in usual.items()}
        return {**{key: value for key, value in usual.items() if key != "type"}, "rope_type": kind, **_ROPE[kind]}

    changes: dict[str, Any] = {"rope_parameters": of(fields["rope_parameters"])}
    if kind == "dynamic" and "max_position_embeddings" in fields:
        changes["max_position_embeddings"] = ORIGINAL
    if "original_max_position_embeddings" in fields:
        changes["original_max_position_embeddings"] = ORIGINAL
    return changes


def made(name: str, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """Returns the small configuration of a variant. longrope has as many factors as its rotary embedding has frequencies."""
    rope = changes.get("rope_parameters")
    if rope is None or "longrope" not in str(rope):
        return small(name, changes)
    usual = build(small(name), dtype="float32", attention="sdpa")
    sizes = {key.removesuffix("inv_freq"): buffer.numel() for key, buffer in _frequencies(usual)}

    def filled(part: Any, size: int) -> Any:
        short, long = [1.0 + n / 8 for n in range(size)], [2.0 + n for n in range(size)]
        return part | {"short_factor": short, "long_factor": long} if isinstance(part, dict) else part

    if "rope_type" in rope:
        rope = filled(rope, next(iter(sizes.values())))
    else:
        rope = {key: filled(part, sizes.get(f"{key}_", next(iter(sizes.values())))) for key, part in rope.items()}
    return small(name, {**changes, "rope_parameters": rope})


def exists(name: str, label: str) -> bool:
    """Tells whether transformers makes such a model: not every family takes every rotary type."""
    try:
        build(made(name, variants(name)[label]), dtype="float32", attention="sdpa")
    except Exception:  # whatever a family's code says of it
        return False
    return True


def _frequencies(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    decoder = model.get_decoder() or model.base_model
    for key, buffer in decoder.named_buffers():
        own = key.rpartition(".")[2]
        if own.endswith("inv_freq") and "original" not in own:
            yield own, buffer


def tried(name: str) -> Family:
    """Builds a family's model small, in every way, and asks whether it trains and keeps documents of a row apart."""
    model = str(_CLASSES[name])
    try:
        reasons, apart = _tried(name, "usual")
    except Exception as error:  # whatever a family's code says of sizes that it does not take
        return Family(name=name, model=model, trains="not tried", isolated="", why=f"not made small: {_short(str(error))}")
    refused, kept = {"usual": reasons} if reasons else {}, {"usual": apart} if not reasons else {}
    for label in list(variants(name))[1:]:
        if not exists(name, label):
            continue
        reason, apart = _tried(name, label)
        if reason:
            if computes(made(name, variants(name)[label])):
                refused[label] = reason
        else:
            kept[label] = apart
    return _judged(name, model, refused, kept)


def _judged(name: str, model: str, refused: Mapping[str, str], kept: Mapping[str, bool]) -> Family:
    if all(label.startswith("rope ") for label in kept):  # which were not tried from files
        return Family(name=name, model=model, trains="no", isolated="", why=_short(next(iter(refused.values()))))
    usual = {label: apart for label, apart in kept.items() if not label.startswith("rope ")}
    mixing = [label for label, apart in usual.items() if not apart]
    isolated = "yes" if not mixing else "no" if len(mixing) == len(usual) or "every kind of layer" in mixing else "some"
    by_reason: dict[str, list[str]] = {}
    for label, reason in refused.items():
        by_reason.setdefault(_short(reason), []).append(label)
    told = "; ".join(f"not with {', '.join(labels)}: {reason}" for reason, labels in by_reason.items())
    if "usual" in refused:
        told = told.replace("not with usual", "not usually", 1)
    return Family(name=name, model=model, trains="some" if "usual" in refused else "yes", isolated=isolated, why=told)


def _tried(name: str, label: str) -> tuple[str, bool]:
    """Says why a variant does not train, empty for one that does, and whether it keeps documents apart. Goes by files that
    transformers writes; rotary types change nothing in them."""
    config, model = made(name, variants(name)[label]), str(_CLASSES[name])
    why = _refusal(config)
    if why or label.startswith("rope "):
        return why.removeprefix(f"{model} cannot be streamed: "), False
    with TemporaryDirectory() as folder:
        write(config, Path(folder))
        read = load_config(Path(folder))
        why = _unreadable(read, Path(folder))
        return why, not why and _isolated(read)


def computes(config: PreTrainedConfig) -> bool:
    """Tells whether transformers computes anything with such a model. It makes some that it cannot run."""
    try:
        auto_class(config).from_config(config)(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False)
    except Exception:  # whatever a family's code says of it
        return False
    return True


def write(config: PreTrainedConfig, folder: Path) -> None:
    """Writes a small model with random weights as transformers does."""
    torch.manual_seed(11)
    config.vocab_size = VOCABULARY  # which a configuration of several parts does not have
    model = auto_class(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("weight") and parameter.dim() > 1:
                parameter.mul_(2)  # so that losses depend on what attends to what
            if name.endswith(".A"):
                parameter.normal_()  # of Doge, whose mask would be ones
    model.save_pretrained(folder)


def _unreadable(config: PreTrainedConfig, folder: Path) -> str:
    """Says why a model's file cannot be read."""
    try:
        model = build(config, dtype="float32", attention="sdpa")
        anatomy = outlined(model).anatomy
        entries_for(model, open_checkpoint(folder), untouched=anatomy.untouched, parts=anatomy.parts)
    except UsageError as error:
        return error.message
    return ""


def _refusal(config: PreTrainedConfig) -> str:
    """Says why a model does not train; empty for one that does."""
    reasons = [_refusal_in(config, dtype) for dtype in ("bfloat16", "float32")]
    if reasons[0] and not reasons[1] and "precision.compute=float32" in reasons[0]:
        return ""  # it trains as it says
    return reasons[0]


def _refusal_in(config: PreTrainedConfig, dtype: str) -> str:
    built = build(copy.deepcopy(config), dtype=dtype, attention="sdpa")
    try:
        known = outlined(built)
        if known.refusal is None:
            specified(known, dtype=dtype, micro_batch_size=2, max_seq_len=TOKENS, head_chunk_tokens=0)
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
        "its\nconfiguration class and read from files that transformers writes: whether fuyou trains it, and whether\n"
        "`dataset.packing: isolated` keeps documents of a row apart. Each is tried in several ways: every kind of layer,\n"
        "windows, ALiBi, rotary types yarn, linear, dynamic, longrope and llama3, with and without experts. `some`: not as\n"
        "the family usually is (with experts), but in other ways. A family that does not train is planned from an estimate\n"
        "where its stages can be found. Written by `scripts/models_table.py`; `tests/e2e/test_families_from_files.py` trains\n"
        "each beside plain PyTorch.\n"
    )
    yield "| family | class | trains | isolated | why not |\n| --- | --- | --- | --- | --- |"
    yield from (family.row for family in families)
    count = {told: sum(family.trains == told for family in families) for told in ("yes", "some")}
    yield f"\n{count['yes']} of {len(families)} train, {count['some']} more in some ways. Left out: " + "; ".join(
        f"{why} ({names.replace(' ', ', ')})" for why, names in _ASIDE.items()
    )


def all_tried(families: Sequence[str]) -> list[Family]:
    """Tries all families, some in each process. Raises BrokenProcessPool with their names where the kernel ends one."""
    found: list[Family] = []
    for first in range(0, len(families), _AT_ONCE):
        some = families[first : first + _AT_ONCE]
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as process:  # a Pool waits for ever
            try:
                found += process.map(tried, some)
            except BrokenProcessPool as error:
                error.add_note(f"it tried {', '.join(some)}")
                raise
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="to the terminal instead")
    asked = parser.parse_args(words)
    text = "\n".join(table(all_tried(names()))) + "\n"
    if asked.print:
        print(text, end="")
    else:
        TABLE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
