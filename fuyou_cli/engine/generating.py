"""Lets transformers' own `generate` run while the weights pass through memory: its loop, its caches, its sampling.

The model's forwards stay as they are: a stage's parameters are there while its own forward runs, and nothing else differs.
So a pass gives what it gives in memory, and all rows of a batch share one read of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import groupby
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..core.errors import UsageError
from ..planner.memory import MOST_PRODUCTS, PRODUCT_CODE
from ..spec.plan import lengths_up_to
from .anatomy import Anatomy
from .calls import boundary_of, only_refusals, own_forward, replaced_forwards, with_fake_parameters
from .describe import LiveBytes
from .isolated import turns
from .loss import regular
from .module_state import LastPosition, ModuleState, tracing
from .streamed import place_buffers, put_back
from .vocabulary import holding
from .weight_stream import WeightStream

PROMPT_STEP = 32  # tokens
_ATTENDED_CODE = 12 << 10  # bytes of code for attention to each number of tokens, forward
_OF_A_CHOICE = 32  # bytes per row and token of the vocabulary: float32 scores, sorted, their order, and what is made of them


@contextmanager
def passing(anatomy: Anatomy, stream: WeightStream) -> Iterator[PreTrainedModel]:
    """Gives the model to call, inside: every forward of it is one pass of `stream`. Without gradients; ids on the stream's
    device. Every `generate` begins with modules as they were loaded."""
    model, embedding = anatomy.model, anatomy.model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    placed = place_buffers(model, stream.device)
    begins = model.register_forward_pre_hook(lambda *_: stream.begin_pass(last=False))
    model.eval()
    model.config.use_cache = True
    # `generate` sends ids to where the first parameter rests.
    nowhere = torch.empty(0, embedding.embedding_dim, dtype=embedding.weight.dtype, device=stream.device)
    own = model.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        state.put_back()
        return own(*args, **kwargs)

    replaced = {"generate": generate, "prepare_inputs_for_generation": _prepared(model)}
    vars(model).update(replaced)
    state = ModuleState(model)
    try:
        with replaced_forwards(_forwards(anatomy, stream)), holding(embedding, nowhere, padding=None), torch.no_grad():
            yield model
    finally:
        begins.remove()
        state.put_back()
        for name in replaced:
            del vars(model)[name]
        put_back(placed)


def _prepared(model: PreTrainedModel) -> Callable[..., Any]:
    """Returns the model's own preparation of a pass, which computes all of a row anew where its positions change: what was
    cached has the old ones. In transformers only the classes of Phi do so."""
    own, changes = model.prepare_inputs_for_generation, [turn.tokens for turn in turns(model) if not turn.growing]

    @wraps(own)  # `generate` reads its arguments
    def prepared(input_ids: torch.Tensor, past_key_values: Any = None, **given: Any) -> Any:
        tokens = input_ids.shape[1]
        if past_key_values and any(past_key_values.get_seq_length() <= change < tokens for change in changes):
            past_key_values, given["next_sequence_length"] = None, None
        return own(input_ids, past_key_values=past_key_values, **given)

    return prepared


def _forwards(anatomy: Anatomy, stream: WeightStream) -> dict[nn.Module, Callable[..., Any]]:
    """Returns what replaces the forward of every module that is a stage, or the last one's linear layer."""
    head = anatomy.model.get_output_embeddings()
    numbered = [
        (head if stage.module is None else stage.module, number)
        for number, stage in enumerate(anatomy.stages)
        if stage.expert_range is None  # visited with its block
    ]
    return {
        module: _forward(stream, own_forward(module), [number for _, number in numbers])
        for module, numbers in groupby(numbered, key=lambda one: one[0])
    }


def _forward(stream: WeightStream, own: Callable[..., Any], stages: list[int]) -> Callable[..., Any]:
    """Returns a forward with weights. Of a head that is cut along the vocabulary, each of its `stages` gives some logits."""
    name = stream.anatomy.stages[stages[0]].name

    def with_weights(*args: Any, **kwargs: Any) -> Any:
        args = tuple(regular(arg) if isinstance(arg, torch.Tensor) and arg.dim() else arg for arg in args)
        if stages[0] in stream.by_rows:
            return stream.looked_up(stages[0], own, *args, **kwargs)
        if ranges := stream.ranges(stages[0]):
            with stream.installed(stages[0]) as parameters:
                out = own(*args, **kwargs)
                sent = stream.sent(parameters)
            y, (sums,) = boundary_of(out, name), stream.expert_sums(ranges, [sent])
            y = (y + sums.view(y.shape)).to(y.dtype)
            return (y, *out[1:]) if isinstance(out, tuple) else y
        outputs = []
        for stage in stages:
            with stream.installed(stage):
                outputs.append(own(*args, **kwargs))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    return with_weights


def prompt_step(model: PreTrainedModel, device: torch.device) -> int:
    """Returns the step of `rounded_up` to which prompts are padded on the left; 0: to no more than the longest of a batch.

    On a CPU libraries keep code for each length in bfloat16. Convolutions would see the padding, and positions that depend on
    the length of a row would change.
    """
    if device.type != "cpu" or model.dtype != torch.bfloat16 or turns(model):
        return 0
    return 0 if any(isinstance(module, nn.Conv1d) for module in model.base_model.modules()) else PROMPT_STEP


# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationMemory:
    """Tells what generating takes beside weights, at its peak. Bytes."""

    cache: int  # keys and values of all rows at their full length
    work: int  # outputs of modules, and what a cache needs to grow

    @property
    def total(self) -> int:
        return self.cache + self.work


def room(model: PreTrainedModel, *, rows: int, prompt: int, new: int) -> GenerationMemory:
    """Finds what `rows` prompts of `prompt` tokens take that are continued by `new` tokens: runs the first pass and the last
    one on fake tensors. Raises UsageError for a model that keeps no cache."""
    whole = prompt + new
    anew = max((turn.tokens + 1 for turn in turns(model) if not turn.growing and prompt <= turn.tokens < whole), default=0)
    with (
        only_refusals(model, shape=(rows, whole)), torch.no_grad(), tracing(model), with_fake_parameters(model),
    ):  # fmt: skip
        first = LiveBytes(*model.parameters())
        _pass(model, rows, max(prompt, anew), max(prompt, anew), None, first)
        last = LiveBytes(*model.parameters())
        cache = _pass(model, rows, whole, whole, None, last)
        kept, rests, last.peak = _nbytes(cache), last.live, 0
        _pass(model, rows, 1, whole + 1, cache, last)
    beside = kept * anew // whole  # what was cached stays until a row is computed anew
    choice = rows * model.config.get_text_config().vocab_size * _OF_A_CHOICE
    return GenerationMemory(cache=kept, work=max(first.peak + beside - kept, last.peak - rests) + choice)


def generation_code(model: PreTrainedModel, *, prompt: int, new: int) -> int:
    """Returns the bytes of code that libraries keep on a CPU in bfloat16, for prompts of up to `prompt` tokens, padded to
    `prompt_step`, and `new` tokens after each: of products for each length of a prompt, of attention for each length."""
    matrices = {tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() == 2}
    products = len(matrices) * lengths_up_to(prompt, PROMPT_STEP)
    return min(products, MOST_PRODUCTS) * PRODUCT_CODE + (prompt + new) * _ATTENDED_CODE


def _pass(model: PreTrainedModel, rows: int, tokens: int, end: int, cache: Any, live: LiveBytes) -> Any:
    """Runs a pass over `tokens` tokens, up to the one at `end`, and returns the cache."""
    given: dict[str, Any] = {"input_ids": torch.zeros(rows, tokens, dtype=torch.long), "past_key_values": cache}
    given["attention_mask"] = torch.ones(rows, end, dtype=torch.long)
    given["position_ids"] = torch.arange(end - tokens, end).unsqueeze(0)
    of_last = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    with LastPosition(end), live:
        out = model(**given, **of_last, use_cache=True, return_dict=True)
    cache = getattr(out, "past_key_values", None)
    if cache is None:
        raise UsageError("it keeps no cache of keys and values")
    return cache


def _nbytes(cache: Any) -> int:
    """Returns the bytes of keys and values in a cache of transformers; what it counts with is not worth counting."""
    held = [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in held if tensor.is_floating_point())
