#!/usr/bin/env python3
"""Makes a Llama checkpoint, or one of Qwen3's mixtures, with random weights: a model directory that needs no download.

    python scripts/make_checkpoint.py --shape 50m --out models/50m --dtype bfloat16 --tokenizer-text corpus.txt

Weights are drawn tensor by tensor, so peak memory is a few pieces of 16 MiB for every shape. Training the tokenizer takes a
small multiple of its text. The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from fuyou_cli.checkpoint.writer import OutTensor, write_checkpoint
from fuyou_cli.core.errors import FuyouError
from fuyou_cli.core.units import count, gb, parse_size

DEVIATION = 0.02  # of the normal distribution that Llama's matrices start from
POSITIONS = 2048
TOKENIZER_VOCABULARY = 8000
END_OF_TEXT, PADDING = "<|endoftext|>", "<|padding|>"  # ids 0 and 1
BLOCK = 1 << 20  # elements drawn at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    experts: int = 0  # of each layer, a mixture; `intermediate` is the width of one
    chosen: int = 0  # experts of a token


SHAPES = {
    "1m": Shape(vocabulary=4096, hidden=96, intermediate=256, layers=2, heads=4, kv_heads=2),
    "odd": Shape(vocabulary=4099, hidden=88, intermediate=251, layers=2, heads=4, kv_heads=1),
    "20m": Shape(vocabulary=4096, hidden=384, intermediate=1024, layers=10, heads=6, kv_heads=6),
    "50m": Shape(vocabulary=16384, hidden=512, intermediate=1408, layers=10, heads=8, kv_heads=8),
    "125m": Shape(vocabulary=32000, hidden=768, intermediate=2048, layers=11, heads=12, kv_heads=12),
    "350m": Shape(vocabulary=32000, hidden=1024, intermediate=2816, layers=22, heads=16, kv_heads=16),
    "1.1b": Shape(vocabulary=32000, hidden=2048, intermediate=5632, layers=22, heads=32, kv_heads=4),
    # Eight and four of Llama-8B's 32 layers, and a quarter of its vocabulary: 2.0 and 1.1 B parameters.
    "llama8b-8": Shape(vocabulary=32768, hidden=4096, intermediate=14336, layers=8, heads=32, kv_heads=8),
    "llama8b-4": Shape(vocabulary=32768, hidden=4096, intermediate=14336, layers=4, heads=32, kv_heads=8),
    "moe-tiny": Shape(vocabulary=4096, hidden=96, intermediate=48, layers=2, heads=4, kv_heads=2, experts=8, chosen=2),
    "moe-120m": Shape(vocabulary=8192, hidden=512, intermediate=256, layers=8, heads=8, kv_heads=8, experts=32, chosen=4),
    "moe": Shape(vocabulary=8192, hidden=1024, intermediate=512, layers=10, heads=16, kv_heads=16, experts=64, chosen=8),
    "moe-8": Shape(vocabulary=8192, hidden=1024, intermediate=512, layers=8, heads=16, kv_heads=16, experts=64, chosen=8),
}


def tensors_of(shape: Shape, dtype: str) -> list[OutTensor]:
    """Lists every tensor of the untied model, in the order in which the model computes with them."""
    hidden, intermediate = shape.hidden, shape.intermediate
    kv = hidden // shape.heads * shape.kv_heads
    block = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
    }
    if shape.experts:
        head = hidden // shape.heads
        block |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,), "mlp.gate": (shape.experts, hidden)}
    for part in [f"mlp.experts.{number}" for number in range(shape.experts)] or ["mlp"]:
        block |= {f"{part}.gate_proj": (intermediate, hidden), f"{part}.up_proj": (intermediate, hidden)}
        block[f"{part}.down_proj"] = (hidden, intermediate)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, hidden)}
    for layer in range(shape.layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": size for name, size in block.items()}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (shape.vocabulary, hidden)}
    return [OutTensor(name=name, dtype=dtype, shape=size) for name, size in shapes.items()]


def random_weights(tensors: list[OutTensor], seed: int) -> Callable[[OutTensor, int, int], memoryview]:
    """Draws pieces of tensors in order. Each tensor has its own random stream, so piece sizes do not matter."""
    numbers = {tensor.name: number for number, tensor in enumerate(tensors)}
    stream = np.random.default_rng(0)

    def read(tensor: OutTensor, first: int, wanted: int) -> memoryview:
        nonlocal stream
        if first == 0:
            stream = np.random.default_rng([seed, numbers[tensor.name]])
        piece = np.empty(wanted, np.uint16 if tensor.dtype == "bfloat16" else np.float32)
        for begin in range(0, wanted, BLOCK):
            part = piece[begin : begin + BLOCK]
            values = np.ones(len(part), np.float32)
            if len(tensor.shape) > 1:
                stream.standard_normal(dtype=np.float32, out=values)
                values *= np.float32(DEVIATION)
            part[:] = rounded_to_bfloat16(values) if tensor.dtype == "bfloat16" else values
        return piece.data

    return read


def repeated_weights(tensors: list[OutTensor], seed: int) -> Callable[[OutTensor, int, int], memoryview]:
    """Repeats the first million numbers of each tensor to its end, in a tenth of the time. Their count is odd, so that no two
    rows of a matrix are alike."""
    read, drawn = random_weights(tensors, seed), np.empty(0, np.uint16)

    def read_again(tensor: OutTensor, first: int, wanted: int) -> memoryview:
        nonlocal drawn
        if first == 0:
            drawn = np.asarray(read(tensor, 0, min(tensor.numel, BLOCK - 1)))
        return np.resize(np.roll(drawn, -(first % len(drawn))), wanted).data

    return read_again


def rounded_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Returns the upper halves of finite float32 values, rounded to nearest, ties to even, as uint16 patterns."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def config_of(shape: Shape, dtype: str) -> dict[str, object]:
    kind: dict[str, object] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if shape.experts:
        kind = {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": shape.experts,
            "num_experts_per_tok": shape.chosen, "moe_intermediate_size": shape.intermediate, "norm_topk_prob": True,
        }  # fmt: skip
    return {
        **kind,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "hidden_act": "silu",
        "max_position_embeddings": POSITIONS,
        "initializer_range": DEVIATION,
        "rms_norm_eps": 1e-06,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "dtype": dtype,
    }


def tokenizer_files(text: Path, vocabulary: int) -> dict[str, bytes | Path]:
    """Trains a byte-level BPE tokenizer on `text`: any string goes in and comes back unchanged."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocabulary, TOKENIZER_VOCABULARY),
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts_of(text), trainer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PADDING,
        "model_max_length": POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
    }


def texts_of(path: Path) -> Iterator[str]:
    """Yields the lines of a text file, or every string of a JSON-lines file."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if path.suffix == ".jsonl":
                yield from strings_of(json.loads(line))
            else:
                yield line


def strings_of(value: object) -> Iterator[str]:
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            pending.extend(reversed(one.values()))
        elif isinstance(one, list):
            pending.extend(reversed(one))


def make(arguments: argparse.Namespace) -> None:
    shape = SHAPES[arguments.shape]
    tensors = tensors_of(shape, arguments.dtype)
    config = config_of(shape, arguments.dtype)
    companions: dict[str, bytes | Path] = {"config.json": (json.dumps(config, indent=2) + "\n").encode()}
    if arguments.tokenizer_text is not None:
        companions |= tokenizer_files(arguments.tokenizer_text, shape.vocabulary)
    files = write_checkpoint(
        arguments.out,
        tensors,
        (repeated_weights if arguments.repeat else random_weights)(tensors, arguments.seed),
        max_shard_size=arguments.shard_size,
        metadata={"shape": arguments.shape, "seed": str(arguments.seed)},
        companions=companions,
    )
    parameters, size = sum(tensor.numel for tensor in tensors), sum(tensor.nbytes for tensor in tensors)
    tokenizer = "with" if arguments.tokenizer_text is not None else "without"
    print(f"{arguments.out}: {count(parameters)} parameters, {gb(size)} in {len(files)} files, {tokenizer} tokenizer")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--shard-size", type=parse_size, default="500MB", help="of one file, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", action="store_true", help="draw a million numbers of a tensor, and repeat them")
    parser.add_argument("--tokenizer-text", type=Path, help="text or JSON-lines file to train a tokenizer on")
    arguments = parser.parse_args()
    if arguments.seed < 0:
        parser.error("--seed is not negative")
    try:
        make(arguments)
    except FuyouError as error:
        print(f"error: {error.message}" + (f"\n{error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    except (OSError, ValueError) as error:  # the tokenizer's text: unreadable, not UTF-8, not JSON
        print(f"error: {arguments.tokenizer_text}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
