"""Makes a model's files as a parser of checkpoints finds them, and reads them as an import, an export or a run does."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from fuyou_cli.checkpoint.files import SINGLE_NAME

TABLES = (
    b'{"a.weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"format":"pt"}}',
    b'{"b.weight":{"dtype":"BF16","shape":[1,4],"data_offsets":[0,8]}}',
)
SHARDS = ("one.safetensors", "two.safetensors")


def framed(table: bytes, size: int = 8) -> bytes:
    """Makes a safetensors file with this header and so many bytes of data."""
    return struct.pack("<Q", len(table)) + table + bytes(size)


def read_header(folder: Path) -> object:
    from fuyou_cli.checkpoint.header import parse_file

    return parse_file(folder / SINGLE_NAME)


def read_index(folder: Path) -> object:
    from fuyou_cli.checkpoint.files import open_checkpoint

    return open_checkpoint(folder)


def index_bytes() -> list[bytes]:
    places = {"a.weight": SHARDS[0], "b.weight": SHARDS[1]}
    return [json.dumps({"metadata": {"total_size": 16}, "weight_map": places}).encode()]


def quantised(state: bytes) -> bytes:
    """Makes a file with a tensor of 8 x 8 in nf4 that says `state` of itself."""
    from fuyou_cli.swap.kernels import nf4_levels

    parts = {
        "a.weight": ("U8", bytes(32)), "a.weight.absmax": ("F32", struct.pack("<f", 1)),
        "a.weight.quant_map": ("F32", nf4_levels().tobytes()), "a.weight.quant_state.bitsandbytes__nf4": ("U8", state),
    }  # fmt: skip
    table, end = dict[str, Any](), 0
    for name, (dtype, data) in parts.items():
        begin, end = end, end + len(data)
        table[name] = {"dtype": dtype, "shape": [len(data) // (4 if dtype == "F32" else 1)], "data_offsets": [begin, end]}
    return framed(json.dumps(table).encode(), 0) + b"".join(data for _, data in parts.values())


QUANT_STATE = b'{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [8, 8]}'

OWN_FORMATS = (  # a tensor of experts in mxfp4, and a matrix in fp8: 42 bytes
    b'{"e_blocks":{"dtype":"U8","shape":[1,2,1,16],"data_offsets":[0,32]},"e_scales":{"dtype":"U8","shape":[1,2,1],'
    b'"data_offsets":[32,34]},"w":{"dtype":"F8_E4M3","shape":[2,2],"data_offsets":[34,38]},'
    b'"w_scale_inv":{"dtype":"F32","shape":[1,1],"data_offsets":[38,42]}}'
)


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "hidden_act": "silu", "dtype": "float32", "eos_token_id": [1, 2],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


_QUANTISED = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": ["lm_head"],
}  # fmt: skip
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}


def configs() -> list[bytes]:
    said = ({}, {"quantization_config": _QUANTISED}, {"quantization_config": _FP8})
    return [json.dumps(CONFIG | one).encode() for one in said]


def read_config(folder: Path) -> object:
    """Reads a configuration as an export does."""
    from fuyou_cli.checkpoint.files import companion_files

    return companion_files(folder, dtype="bfloat16")


def read_model(folder: Path) -> object:
    """Reads a model as a run does, up to a model without weights."""
    from fuyou_cli.engine.skeleton import build, load_config

    return build(load_config(folder), dtype="bfloat16", attention="eager")
