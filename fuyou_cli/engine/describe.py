"""Describes a model for planning, whether or not the engine can train it.

`fuyou plan` answers for causal language models whose blocks can be found and whose forward can be traced. If `dissect` refuses
a model, its stages are outlined and their costs estimated, and the plan shows the refusal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..core.errors import UsageError
from ..spec.model import ModelSpec, StageSpec, TensorSpec
from .anatomy import Anatomy, dissect, outline
from .calls import Between, stage_calls
from .freezing import with_frozen_work
from .inspect import Short, inspect
from .isolated import isolated as kept_apart
from .isolated import kept_apart_if_possible
from .skeleton import EXPERT_KEYS, setting, stays_float32

_STEPS = 64  # tokens, a whole chunk where blocks without attention compute in chunks
_FEW = 16  # operators per token: one chunk has fewer (xLSTM: 7), a scan has more (Mamba: 34)
_CHOSEN_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlined:
    """Holds stages, and why they cannot be trained yet (None if no reason is known)."""

    anatomy: Anatomy
    refusal: str | None


def outlined(model: PreTrainedModel, *, strict: bool = False, isolated: bool = False) -> Outlined:
    """Finds the stages of any model with blocks, which keep documents of a row apart if the model can. `strict`: raises the
    UsageError if the model cannot be trained. `isolated`: raises it also if the model would mix documents."""
    try:
        anatomy = dissect(model)
        return Outlined(anatomy=kept_apart(anatomy) if isolated else kept_apart_if_possible(anatomy), refusal=None)
    except UsageError as error:
        if strict:
            raise
        return Outlined(anatomy=outline(model), refusal=error.message)


def specified(known: Outlined, *, dtype: str, micro_batch_size: int, max_seq_len: int, head_chunk_tokens: int) -> ModelSpec:
    """Returns the model's specification at micro-batches of (micro_batch_size, max_seq_len). Raises UsageError if it cannot be
    traced."""
    specify = traced if known.refusal is None else estimate
    try:
        model = specify(
            known.anatomy,
            dtype=dtype,
            micro_batch_size=micro_batch_size,
            max_seq_len=max_seq_len,
            head_chunk_tokens=head_chunk_tokens,
        )
    except UsageError as error:
        raise UsageError(known.refusal or error.message, hint=error.hint) from error
    return _counted(model, known.anatomy)


def _counted(model: ModelSpec, anatomy: Anatomy) -> ModelSpec:
    """Adds the counts that neither costs nor stages show."""
    mixture = Mixture.of(anatomy.model.config.get_text_config())
    return replace(
        model,
        inactive_parameters=sum(mixture.inactive(stage.tensors) for stage in model.stages),
        inactive_frozen=sum(mixture.inactive(t for t in stage.tensors if t.frozen) for stage in model.stages),
        float32_parameters=_kept_in_float32(anatomy.model) if model.compute_dtype == "bfloat16" else 0,
    )


def _kept_in_float32(model: PreTrainedModel) -> int:
    """Counts elements that a bfloat16 model of this family keeps in float32: created so, or listed by its class."""
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.dtype == torch.float32 or stays_float32(model, name)
    )


# ---- recurrent blocks ------------------------------------------------------------------------------------------------


def traced(anatomy: Anatomy, *, dtype: str, micro_batch_size: int, max_seq_len: int, head_chunk_tokens: int) -> ModelSpec:
    """Returns the specification of a model that the engine trains.

    A block that computes token by token has operators for each, so that tracing a long row takes minutes. The same number of
    tokens is traced in short rows instead, because what such a block keeps grows with the number of tokens and not with their
    distance. None of its operators is kept: those of short rows are not those of a run.
    """
    short = _short(anatomy, (micro_batch_size, max_seq_len)) if _is_unrolled(anatomy) else None
    shape = {"micro_batch_size": micro_batch_size, "max_seq_len": max_seq_len}
    return inspect(anatomy, dtype=dtype, head_chunk_tokens=head_chunk_tokens, short=short, **shape)


def _short(anatomy: Anatomy, shape: tuple[int, int]) -> Short | None:
    return Short.of(shape, {size for parameter in anatomy.model.parameters() for size in parameter.shape})


def _is_unrolled(anatomy: Anatomy) -> bool:
    """Tells whether a model without attention has operators for every token of a row."""
    if setting(anatomy.model.config.get_text_config(), "num_attention_heads"):
        return False
    between = Between()
    stage_calls(anatomy.model, anatomy.modules(), shape=(1, _STEPS), between=between)
    return between.operators >= _FEW * _STEPS


# ---- what cannot be trained ------------------------------------------------------------------------------------------


def estimate(anatomy: Anatomy, *, dtype: str, micro_batch_size: int, max_seq_len: int, head_chunk_tokens: int) -> ModelSpec:
    """Returns the specification of a model that the engine cannot train. Its counts are exact; the work of its blocks follows
    rules. Blocks that may be recurrent are traced in short rows.
    """
    shape = micro_batch_size, max_seq_len
    short = _short(anatomy, shape) if _is_recurrent(anatomy) else None
    sizes = {"micro_batch_size": micro_batch_size, "max_seq_len": max_seq_len}
    model = inspect(anatomy, dtype=dtype, head_chunk_tokens=head_chunk_tokens, short=short, **sizes)
    text = anatomy.model.config.get_text_config()
    stages = list(model.stages)
    for layer, stage in enumerate(stage for stage in model.stages if stage.kind == "block"):
        stages[stage.index] = replace(stage, forward_flops=_block_flops(stage, layer, text, shape))
    return with_frozen_work(replace(model, stages=tuple(stages)), tokens=micro_batch_size * max_seq_len)


def _is_recurrent(anatomy: Anatomy) -> bool:
    """Tells whether some block may process one token after the other: it has no attention, or a convolution over the last few
    tokens."""
    modules = (module for block in anatomy.modules() for module in block.modules())
    text = anatomy.model.config.get_text_config()
    return not setting(text, "num_attention_heads") or any(isinstance(module, nn.Conv1d) for module in modules)


# ---- work ------------------------------------------------------------------------------------------------------------


def _block_flops(stage: StageSpec, layer: int, text: PreTrainedConfig, shape: tuple[int, int]) -> float:
    """Counts the FLOPs of a block: 2 per token and active parameter. Attention adds 2 per token, earlier token, head, and
    element of a query and of a value."""
    rows, tokens = shape
    active = stage.numel - Mixture.of(text).inactive(stage.tensors)
    attention = rows * tokens * tokens * _attended(text, layer) if _attends(text, layer) else 0
    return float(2 * active * rows * tokens + attention)


def _attends(text: PreTrainedConfig, layer: int) -> bool:
    """Tells whether a block reads all earlier tokens, by the configuration's list of layer types if it has one."""
    types = getattr(text, "layer_types", None)
    if isinstance(types, (list, tuple)) and layer < len(types):
        return "attention" in types[layer] and not types[layer].startswith("linear")
    return bool(setting(text, "num_attention_heads", layer=layer))


def _attended(text: PreTrainedConfig, layer: int) -> int:
    """Returns heads times the elements of a query and of a value. In latent attention the two sizes differ."""

    def size(name: str) -> int:
        return int(setting(text, name, layer=layer) or 0)

    heads = size("num_attention_heads")
    plain = size("head_dim") or (size("hidden_size") // heads if heads else 0)
    latent = size("qk_nope_head_dim") and size("qk_rope_head_dim")
    query = size("qk_nope_head_dim") + size("qk_rope_head_dim") if latent else plain
    return heads * (query + (size("v_head_dim") or plain))


# ---- mixtures of experts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Describes the experts of a block, and how many of them process one token. A dense model has one.

    transformers keeps the routed experts of a block in a module named `experts`, as tensors with one slice per expert or as a
    list of modules. Shared experts have other names. If the configuration does not say how many experts there are and how many
    process a token, every parameter counts as active.
    """

    experts: int
    chosen: int

    @classmethod
    def of(cls, text: PreTrainedConfig) -> Mixture:
        experts, chosen = _first(text, EXPERT_KEYS), _first(text, _CHOSEN_KEYS)
        return cls(experts=experts, chosen=chosen) if 0 < chosen < experts else cls(experts=1, chosen=1)

    def is_routed(self, tensor: TensorSpec) -> bool:
        return tensor.routed or self.is_fused(tensor) or _below_experts(tensor).partition(".")[0].isdigit()

    def is_fused(self, tensor: TensorSpec) -> bool:
        """Tells whether `tensor` holds all experts, one slice each: a matrix of each, or a bias by its place."""
        of_each = len(tensor.shape) > 2 or bool(_below_experts(tensor))
        return self.experts > 1 and of_each and tensor.shape[0] == self.experts

    def inactive(self, tensors: Iterable[TensorSpec]) -> int:
        """Returns the elements (without padding) of a stage's `tensors` that one token does not use."""
        routed = sum(tensor.numel for tensor in tensors if self.is_routed(tensor))
        return routed * (self.experts - self.chosen) // self.experts


def _below_experts(tensor: TensorSpec) -> str:
    """Returns the tensor's name within a module named `experts`, empty elsewhere."""
    return f".{tensor.name}".partition(".experts.")[2]


def _first(text: PreTrainedConfig, names: tuple[str, ...]) -> int:
    """Returns the first of these keys that the configuration has as a number, or 0."""
    values = [setting(text, name) for name in names]
    return next((value for value in values if isinstance(value, int)), 0)
