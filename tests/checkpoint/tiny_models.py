"""Makes small real models of several families, with weights that no two of them share."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from fuyou_cli.checkpoint.files import open_checkpoint
from fuyou_cli.checkpoint.names import entries_for
from fuyou_cli.checkpoint.reader import TensorEntry, TensorReader
from fuyou_cli.checkpoint.writer import OutTensor

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}

CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**_GROUPED),
    "llama_tied": lambda: transformers.LlamaConfig(**_GROUPED, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**_GROUPED, head_dim=8),
    "qwen3": lambda: transformers.Qwen3Config(**_GROUPED, head_dim=16),
    "gemma": lambda: transformers.GemmaConfig(**_GROUPED, head_dim=8),
    "gemma2": lambda: transformers.Gemma2Config(**_GROUPED, head_dim=8),
    "gemma3": lambda: transformers.Gemma3TextConfig(**_GROUPED, head_dim=8),
    "phi3": lambda: transformers.Phi3Config(**_GROUPED),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_COMMON),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=96, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
    ),
}


def make_model(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 1) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too: zeros and ones would hide an exchange
            parameter.copy_(torch.randn_like(parameter))
    return model


def on_meta(directory: Path) -> PreTrainedModel:
    """The model of a directory without its weights, as an import sees it."""
    config = transformers.AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def loaded(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    model, problems = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    assert not any(problems.values()), problems
    return model


def matched_entries(directory: Path) -> dict[str, TensorEntry]:
    return entries_for(on_meta(directory), open_checkpoint(directory))


def read_all(entries: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
    with TensorReader() as reader:
        return {name: reader.read(entry) for name, entry in entries.items()}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def assert_same_bits(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not same_bits(one[name], other[name])] == []


def out_tensors(tensors: Mapping[str, torch.Tensor]) -> list[OutTensor]:
    return [
        OutTensor(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def reading(tensors: Mapping[str, torch.Tensor]) -> Callable[[OutTensor, int, int], memoryview]:
    def read(tensor: OutTensor, first: int, count: int) -> memoryview:
        piece = tensors[tensor.name].detach().reshape(-1)[first : first + count].contiguous()
        return piece.view(torch.uint8).numpy().data

    return read


def safetensors_bytes(table: Mapping[str, object] | bytes, data: bytes) -> bytes:
    """Returns a file as anybody could write it, right or wrong."""
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_file(path: Path, tensors: Sequence[tuple[str, str, list[int], int]]) -> Path:
    """Writes a correct file of (name, dtype, shape, bytes), its data counting upwards."""
    table: dict[str, object] = {}
    offset = 0
    for name, dtype, shape, size in tensors:
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    path.write_bytes(safetensors_bytes(table, bytes(number % 251 for number in range(offset))))
    return path
