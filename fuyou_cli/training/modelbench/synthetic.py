"""Makes up what a run reads: a model's configuration, random weights and random tokens.

Weights are normally distributed, not zero, because a GPU multiplies zeros faster. All tensors are read from one file, as large
as the largest tensor, so no checkpoint has to be written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from ...checkpoint.header import TensorEntry
from ...data.rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_LLAMA = {"max_position_embeddings": 8192, "tie_word_embeddings": False}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "8b": ("llama", {**_LLAMA, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}),
    "13b": ("llama", {**_LLAMA, "vocab_size": 32000, "hidden_size": 5120, "intermediate_size": 13824,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40}),
    "70b": ("llama", {**_LLAMA, "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}),
    "175b": ("opt", {"vocab_size": 50272, "hidden_size": 12288, "word_embed_proj_dim": 12288, "ffn_dim": 49152,
        "num_hidden_layers": 96, "num_attention_heads": 96, "max_position_embeddings": 2048, "dropout": 0.0}),
}  # fmt: skip
NAMES = tuple(_CONFIGS)
_TOKENS = 2048  # tokens per row
_DEVIATION = 0.02  # standard deviation of such models' initial weights
_DRAWN = 1 << 22  # values drawn at a time


def named_config(name: str) -> PreTrainedConfig:
    """Returns the configuration of Llama-3.1-8B, Llama-2-13B, Llama-3.1-70B or OPT-175B."""
    from transformers import AutoConfig

    kind, keys = _CONFIGS[name]
    return AutoConfig.for_model(kind, **keys, architectures=["LlamaForCausalLM" if kind == "llama" else "OPTForCausalLM"])


def write_recipe(folder: Path) -> Path:
    """Writes the recipe of a named shape. Overrides set the batch and the folders."""
    recipe = {
        "output_dir": str(folder / "out"),
        "model": {"name_or_path": str(folder / "model")},
        "dataset": {"train": [{"path": str(folder / "rows.jsonl"), "format": "text"}], "max_seq_len": _TOKENS},
        "train": {"max_steps": 1, "batch_size": 16},
        "offload": {"dir": str(folder)},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def write_config(config: PreTrainedConfig, folder: Path, *, blocks: int) -> Path:
    """Writes the configuration with this many blocks of text and returns its folder."""
    import copy

    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = blocks
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:blocks]
    model_dir = folder / f"model-{blocks}"
    config.save_pretrained(model_dir)
    return model_dir


def random_entries(model: PreTrainedModel, folder: Path, *, dtype: str, seed: int) -> Mapping[str, TensorEntry]:
    """Makes up a checkpoint's tensors, by name. Each is the beginning of one random file."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    largest = max(math.prod(shape) for shape in shapes.values())
    file, size = folder / "weights.bin", 2 if dtype == "bfloat16" else 4
    _fill(file, largest, lambda values: _bytes_of(values, dtype), seed)
    return {
        name: TensorEntry(name=name, file=file, dtype=dtype, shape=shape, begin=0, end=size * math.prod(shape))
        for name, shape in shapes.items()
    }


def _fill(file: Path, count: int, packed: Callable[[Any], bytes], seed: int) -> None:
    draws = np.random.default_rng(seed)
    with file.open("wb") as out:
        for begin in range(0, count, _DRAWN):
            drawn = draws.standard_normal(min(_DRAWN, count - begin), np.float32)
            out.write(packed(drawn * np.float32(_DEVIATION)))


def _bytes_of(values: Any, dtype: str) -> bytes:
    return bytes((values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values)


def random_rows(folder: Path, *, rows: int, tokens: int, vocabulary: int, seed: int) -> Rows:
    """Makes rows of equal length as tokenising would, with loss on all tokens."""
    out = folder / f"rows-{rows}-{tokens}"
    out.mkdir(exist_ok=True)
    drawn = np.random.default_rng(seed).integers(0, vocabulary, rows * tokens, dtype=np.int32)
    drawn.tofile(out / "tokens.bin")
    np.ones(rows * tokens, np.uint8).tofile(out / "mask.bin")
    np.save(out / "offsets.npy", np.arange(rows + 1, dtype=np.int64) * tokens)
    nothing = ("truncated", "dropped", "split", "without_loss", "run_together", "pad_id", "special")
    summary = dict.fromkeys(nothing, 0) | {
        "rows": rows, "tokens": rows * tokens, "label_tokens": rows * (tokens - 1), "samples": rows, "longest_row": tokens,
        "highest_token_id": int(drawn.max()), "digest": "random", "formats": [], "preview": [], "special_example": "",
    }  # fmt: skip
    (out / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return Rows(out)
