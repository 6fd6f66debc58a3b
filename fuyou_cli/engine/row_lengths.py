"""Finds at which lengths of a row a model's rotary positions change.

longrope divides frequencies by other factors as soon as a row is longer than the model was trained with at first; dynamic
stretches them by the length of a row that is longer than the model was made for. transformers goes by the longest row of a
batch, so rows that must have positions of their own length go through the model with rows like them only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel


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
