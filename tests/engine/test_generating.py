"""Compares `generate` of transformers on weights that pass through memory with the tokens that it gives with all of them
there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.anatomy import dissect
from fuyou_cli.engine.generating import passing, room
from fuyou_cli.engine.skeleton import build
from fuyou_cli.engine.vocabulary import cut_vocabulary
from fuyou_cli.engine.weight_stream import WeightStream

from .families import FAMILIES, llama
from .test_head import BatchedProducts

PROMPT, NEW = 9, 8
LITTLE = 135_000  # bytes: of most families some blocks stay, and others take turns


class Model:
    """Holds one random model: its stages, and all of it in memory."""

    def __init__(self, config: PreTrainedConfig, *, vocabulary: int = 0) -> None:
        torch.set_num_threads(1)
        self.skeleton = build(config, dtype="float32", attention="sdpa").eval()
        self.anatomy = cut_vocabulary(dissect(self.skeleton), vocabulary)
        torch.manual_seed(11)
        attention = self.skeleton.config._attn_implementation
        own = type(config).from_dict(config.to_dict())
        self.whole: Any = AutoModelForCausalLM.from_config(own, attn_implementation=attention).eval()
        self.weights = dict(self.whole.state_dict())

    def read(self, name: str, into: torch.Tensor, first: int) -> None:
        into.copy_(self.weights[name].view(-1)[first : first + into.numel()])

    def streamed(self, read: Any = None, **asked: Any) -> list[list[int]]:
        with (
            WeightStream(self.anatomy, read or self.read, dtype=torch.float32, memory=LITTLE) as weights,
            passing(self.anatomy, weights) as model,
        ):
            return generated(model, **asked)

    def in_memory(self, **asked: Any) -> list[list[int]]:
        return generated(self.whole, **asked)


def generated(model: Any, **asked: Any) -> list[list[int]]:
    torch.manual_seed(3)
    tokens: list[list[int]] = model.generate(**asked, max_new_tokens=NEW, pad_token_id=0).tolist()
    return tokens


def prompts(rows: int) -> dict[str, torch.Tensor]:
    """Returns prompts of 9, 8, 7 and 6 tokens in turn, padded on the left."""
    ids = torch.randint(1, 97, (rows, PROMPT), generator=torch.Generator().manual_seed(5))
    there = torch.ones_like(ids)
    for row in range(rows):
        ids[row, : row % 4] = there[row, : row % 4] = 0
    return {"input_ids": ids, "attention_mask": there}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "opt", "gpt_neox"])
def test_greedy_tokens_as_in_memory(family: str) -> None:
    """Compares token for token, one prompt and eight; rows end at different places, by one of many end tokens."""
    model = Model(FAMILIES[family])
    for rows in (1, 8):
        asked = {**prompts(rows), "do_sample": False, "eos_token_id": list(range(70, 97))}
        found = model.streamed(**asked)
        assert found == model.in_memory(**asked), rows
    assert len({token for row in found for token in row[PROMPT:]}) > 6


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_in_pieces(tied: bool) -> None:
    model = Model(llama(num_hidden_layers=4, tie_word_embeddings=tied), vocabulary=40)
    asked = {**prompts(3), "do_sample": False}
    assert model.streamed(**asked) == model.in_memory(**asked)


def test_drawn_tokens_as_in_memory() -> None:
    model, asked = Model(llama()), {**prompts(8), "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 40}
    drawn = model.streamed(**asked)
    assert drawn == model.in_memory(**asked)
    assert drawn != model.in_memory(**prompts(8), do_sample=False)


@pytest.mark.parametrize("rows", [1, 8])
def test_the_head_multiplies_by_its_weights_once_for_all_prompts(rows: int) -> None:
    """Torch makes a batched product of rows whose strides are not regular, and copies bfloat16 weights for each."""
    model = Model(llama())
    with BatchedProducts() as products:
        model.streamed(**prompts(rows))
    assert not [shape for shape in products.seen if model.skeleton.config.vocab_size in shape]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_cache_is_counted(family: str) -> None:
    """Counts exactly what transformers' cache holds at the end, also where it keeps the tokens of a window only."""
    model = Model(FAMILIES[family])
    needed = room(model.skeleton, rows=3, prompt=PROMPT, new=NEW)
    cache = model.whole(input_ids=torch.ones(3, PROMPT + NEW, dtype=torch.long), use_cache=True).past_key_values
    assert needed.cache == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert needed.work > 3 * PROMPT * 32 * 4


def test_a_row_that_is_computed_anew_is_counted() -> None:
    """Its first tokens are few, and a pass over most of it follows once its positions change."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    usual = room(build(llama(), dtype="float32", attention="sdpa"), rows=2, prompt=2, new=62)
    changing = llama(rope_parameters={**rope, "original_max_position_embeddings": 60})
    anew = room(build(changing, dtype="float32", attention="sdpa"), rows=2, prompt=2, new=62)
    never = room(build(changing, dtype="float32", attention="sdpa"), rows=2, prompt=2, new=58)
    assert anew.cache == usual.cache and anew.work > usual.work + anew.cache // 2 and never.work <= usual.work


def test_what_reading_raises_arrives() -> None:
    model = Model(llama())

    def fails(name: str, into: torch.Tensor, first: int) -> None:
        raise UsageError("the file is gone")

    with pytest.raises(UsageError, match="gone"):
        model.streamed(fails, **prompts(1), do_sample=False)
    assert "forward" not in vars(model.skeleton.get_output_embeddings())
