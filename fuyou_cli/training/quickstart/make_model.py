"""A Llama-architecture checkpoint of random weights and its tokenizer, made here without any hub.

`python -m fuyou_cli.training.quickstart.make_model DIR [SEED]` is the same in a process of its own, which leaves
nothing in the caller's memory. Weights are drawn and written one shard at a time.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .make_corpus import corpus_rows

if TYPE_CHECKING:
    import torch

# 104 M parameters: at 16 bytes of training state each (bf16 weights and gradient, fp32 master and two moments) 1.55
# times a budget of 1 GiB. Wide and shallow, as two cores multiply few large matrices faster than many small
# ones; the vocabulary is that of the corpus, so the head costs next to nothing.
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 1024, 2816, 8, 16, 16
VOCABULARY = 768
POSITIONS = 1024
INITIAL_STD = 0.02
RESIDUAL_SCALE = (2 * LAYERS) ** -0.5  # for what blocks add to the residual stream: learning starts faster
SHARD_BYTES = 64 << 20
END, PAD = "<|end|>", "<|pad|>"

Shapes = dict[str, tuple[int, ...]]


def make_checkpoint(directory: Path, *, seed: int) -> None:
    """config.json, model-0000x-of-0000y.safetensors with their index (bfloat16), tokenizer and generation_config.json
    in `directory`, which appears whole or not at all. The same seed gives the same bytes with the same libraries.

    A directory that exists is left as it is."""
    if directory.exists():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".checkpoint-") as scratch:
        made = Path(scratch, "checkpoint")
        made.mkdir()
        end, pad = _write_tokenizer(made)
        config = _config(end, pad)
        _write_weights(made, _shapes(config), seed=seed)
        _write_json(made / "generation_config.json", {"eos_token_id": end, "pad_token_id": pad})
        config.save_pretrained(made)
        made.rename(directory)


def _config(end: int, pad: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=POSITIONS,
        initializer_range=INITIAL_STD,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        dtype="bfloat16",
    )


def _write_tokenizer(directory: Path) -> tuple[int, int]:
    """A byte-level BPE of at most VOCABULARY tokens, trained on the corpus. Gives the ids of the end and pad tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator((row["prompt"] + row["completion"] for row in corpus_rows()), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=END,
        pad_token=PAD,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(directory)
    return tokenizer.eos_token_id, tokenizer.pad_token_id


def _shapes(config: Any) -> Shapes:
    """Names and shapes as the architecture itself gives them, on the meta device: no memory."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _shards(shapes: Shapes) -> Iterator[list[str]]:
    """Names in order, cut where a shard would pass SHARD_BYTES."""
    shard: list[str] = []
    size = 0
    for name, shape in shapes.items():
        weight_bytes = 2
        for extent in shape:
            weight_bytes *= extent
        if shard and size + weight_bytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += weight_bytes
    yield shard


def _write_weights(directory: Path, shapes: Shapes, *, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    shards = list(_shards(shapes))
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map.update(dict.fromkeys(names, file))
        tensors = {name: _initial(name, shapes[name], generator) for name in names}
        save_file(tensors, directory / file, metadata={"format": "pt"})
    total = 2 * sum(torch.Size(shape).numel() for shape in shapes.values())
    _write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Norm weights are ones, matrices normal."""
    import torch

    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    std = INITIAL_STD * (RESIDUAL_SCALE if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
    return (torch.randn(shape, generator=generator) * std).to(torch.bfloat16)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    make_checkpoint(Path(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
