"""Finds out whether a model can compute rows whose documents do not see each other (`attention`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..core.errors import UsageError
from .anatomy import Anatomy
from .attention import attention_apart
from .calls import TRIED, only_refusals, stage_calls, with_fake_parameters
from .module_state import tracing

_HINT = "use dataset.packing: concat, or false"


class _Attended(TorchFunctionMode):
    """Whether attention was computed document by document inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or func is attention_apart
        return func(*args, **(kwargs or {}))


def isolated(anatomy: Anatomy) -> Anatomy:
    """Returns the anatomy of a model that computes documents apart. Raises UsageError if the model would mix them."""
    name = type(anatomy.model).__name__
    try:
        for why in _mixes(anatomy):
            raise UsageError(why)
        with only_refusals(anatomy.model, shape=TRIED):
            _try(anatomy)
    except UsageError as error:
        reason = error.message.removeprefix(f"{name} cannot be streamed: ")
        raise UsageError(f"dataset.packing: isolated: {name} cannot keep documents apart: {reason}", hint=_HINT) from error
    return replace(anatomy, isolated=True)


def kept_apart_if_possible(anatomy: Anatomy) -> Anatomy:
    """Returns the anatomy of a model that computes documents apart, or the same one if the model would mix them."""
    try:
        return isolated(anatomy)
    except UsageError:
        return anatomy


def _mixes(anatomy: Anatomy) -> Iterator[str]:
    """Says why documents of a row would see each other, by what is known without running the model."""
    model = anatomy.model
    if not type(model).__module__.startswith("transformers."):
        yield "its code is not a part of transformers"
    if not getattr(model, "_supports_attention_backend", False):
        yield "its attention is computed by code of its own"
    tables = [stage.name for stage in anatomy.stages if stage.kind == "embedding"]
    if len({stage.module for stage in anatomy.stages if stage.kind == "embedding"}) > 1:
        yield f"it looks positions up in a table ({tables[-1]})"
    if any(isinstance(module, nn.Conv1d) for module in model.base_model.modules()):
        yield "it has convolutions over tokens"
    for kind in sorted({"longrope", "dynamic"} & set(rope_types(model))):
        yield f"its positions depend on the length of the row (rope type {kind})"


def _try(anatomy: Anatomy) -> None:
    """Runs each sort of block on fake tensors. Raises UsageError for one that does not attend by transformers' functions."""
    blocks = {stage.name: stage.module for stage in anatomy.stages if stage.kind == "block" and stage.module is not None}
    seen = set()
    for call, x in stage_calls(anatomy.model, anatomy.modules(), shape=TRIED, isolated=True):
        module = blocks.get(call.name)
        sort = module and (type(module), tuple(parameter.shape for parameter in module.parameters()))
        if module is None or sort in seen:
            continue
        seen.add(sort)
        assert hasattr(x, "fake_mode")
        traced = tracing(module, mode=x.fake_mode, length=x.shape[1])
        with traced, torch.no_grad(), with_fake_parameters(module), _Attended() as attended:
            call.output(x)
        if not attended.seen:
            raise UsageError(f"{call.name} ({type(module).__name__}) has no attention that transformers chooses")


# ---- lengths of rows ----------------------------------------------------------------------------------------------
# Finds at which lengths of a row a model's rotary positions change.
#
# longrope divides frequencies by other factors as soon as a row is longer than the model was trained with at first; dynamic
# stretches them by the length of a row that is longer than the model was made for. transformers goes by the longest row of a
# batch, so rows that must have positions of their own length go through the model with rows like them only.


@dataclass(frozen=True, slots=True)
class Turn:
    """Says that rows of more than `tokens` tokens have other positions. `growing`: others for each length from there on."""

    tokens: int
    growing: bool


def rope_types(model: PreTrainedModel) -> Iterator[str]:
    """Yields the kinds of rotary positions of a model; some have one for each type of layer."""
    for _, kind, _ in _rotary(model):
        yield kind


def turns(model: PreTrainedModel) -> list[Turn]:
    """Lists the lengths at which a model's positions change; shortest first."""
    found = set()
    for module, kind, parameters in _rotary(model):
        if kind == "longrope":
            found.add(Turn(parameters["original_max_position_embeddings"], growing=False))
        elif "dynamic" in kind:
            found.add(Turn(module.original_max_seq_len, growing=True))
    return sorted(found, key=lambda turn: turn.tokens)


def _rotary(model: PreTrainedModel) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """Yields (module, kind, parameters) of all rotary positions."""
    for module in model.base_model.modules():
        kind, config = getattr(module, "rope_type", None), getattr(module, "config", None)
        parameters = getattr(config, "rope_parameters", None) or {}
        if isinstance(kind, str):
            yield module, kind, parameters
        elif isinstance(kind, dict):
            yield from ((module, of_layers, parameters[layers]) for layers, of_layers in kind.items())


def alike(model: PreTrainedModel, lengths: Sequence[int], *, new: int = 0) -> list[list[int]]:
    """Groups rows, by their places in `lengths`, that have the positions of their own length in one batch, also while `new`
    tokens follow each of them. One group holds all of them for most models."""
    groups: dict[tuple[int, ...], list[int]] = {}
    found = turns(model)

    def of(length: int, turn: Turn) -> int:
        if length + new <= turn.tokens:
            return 0
        return -1 if length > turn.tokens and not turn.growing else length

    for place, length in enumerate(lengths):
        groups.setdefault(tuple(of(length, turn) for turn in found), []).append(place)
    return list(groups.values())
