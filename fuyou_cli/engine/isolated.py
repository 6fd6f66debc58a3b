"""Finds out whether a model can compute rows whose documents do not see each other (`documents`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..core.errors import UsageError
from .anatomy import Anatomy
from .calls import TRIED, only_refusals, stage_calls, with_fake_parameters
from .documents import attention_apart
from .module_state import tracing
from .row_lengths import rope_types

_HINT = "use dataset.packing: concat, or false"


class _Attended(TorchFunctionMode):
    """Tells whether attention was computed document by document inside the context."""

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
