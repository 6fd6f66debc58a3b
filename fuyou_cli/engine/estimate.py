"""The ModelSpec of a model that the engine cannot train: exact counts, and costs by rules where they cannot be traced.

Peaks are traced as for any other model. Recurrent blocks run one step per token, so tracing a long row takes minutes: as
many tokens are traced in short rows instead, since what such a block keeps grows with the tokens and not with their
distance. Where tracing fails, `ruled` has a rule for everything.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from transformers import PreTrainedConfig

from ..core.errors import UsageError
from ..spec.model import ModelSpec, StageSpec
from .anatomy import Anatomy
from .experts import Mixture
from .inspect import inspect
from .ruled import ruled
from .skeleton import setting

STEPS = 16  # tokens of a row in which recurrent blocks are traced


def estimate(anatomy: Anatomy, *, dtype: str, shape: tuple[int, int], head_chunk_tokens: int) -> ModelSpec:
    """At micro-batches of `shape` (rows, tokens)."""
    try:
        model = _traced(anatomy, dtype=dtype, shape=shape, head_chunk_tokens=head_chunk_tokens)
    except UsageError:
        model = ruled(anatomy, dtype=dtype, shape=shape, head_chunk_tokens=head_chunk_tokens)
    text = anatomy.model.config.get_text_config()
    blocks = [stage.index for stage in model.stages if stage.kind == "block"]
    stages = list(model.stages)
    for layer, index in enumerate(blocks):
        stages[index] = replace(stages[index], forward_flops=block_flops(stages[index], layer, text, shape))
    return replace(model, stages=tuple(stages))


# ---- work ------------------------------------------------------------------------------------------------------------


def block_flops(stage: StageSpec, layer: int, text: PreTrainedConfig, shape: tuple[int, int]) -> float:
    """Floating-point work of a block's forward: 2 per token and active parameter, and where it attends as much per token,
    earlier token, head and element of a query and of a value."""
    rows, tokens = shape
    active = stage.trainable - Mixture.of(text).inactive(stage.tensors)
    attention = rows * tokens * tokens * _attended(text, layer) if _attends(text, layer) else 0
    return float(2 * active * rows * tokens + attention)


def _attends(text: PreTrainedConfig, layer: int) -> bool:
    """Whether a block looks at all earlier tokens, by the configuration's list of layer types where it has one."""
    types = getattr(text, "layer_types", None)
    if isinstance(types, (list, tuple)) and layer < len(types):
        return "attention" in types[layer] and not types[layer].startswith("linear")
    return bool(setting(text, "num_attention_heads", layer=layer))


def _attended(text: PreTrainedConfig, layer: int) -> int:
    """Heads times elements of a query and of a value: latent attention gives the two unequal sizes."""

    def size(name: str) -> int:
        return int(setting(text, name, layer=layer) or 0)

    heads = size("num_attention_heads")
    plain = size("head_dim") or (size("hidden_size") // heads if heads else 0)
    latent = size("qk_nope_head_dim") and size("qk_rope_head_dim")
    query = size("qk_nope_head_dim") + size("qk_rope_head_dim") if latent else plain
    return heads * (query + (size("v_head_dim") or plain))


# ---- peaks -----------------------------------------------------------------------------------------------------------


def _is_recurrent(anatomy: Anatomy) -> bool:
    """Whether some block may go token by token: without attention, or with a convolution over the latest few tokens, as
    state-space models and linear attention have it."""
    modules = (module for block in anatomy.modules if block is not None for module in block.modules())
    text = anatomy.model.config.get_text_config()
    return not setting(text, "num_attention_heads") or any(isinstance(module, nn.Conv1d) for module in modules)


def _traced(anatomy: Anatomy, *, dtype: str, shape: tuple[int, int], head_chunk_tokens: int) -> ModelSpec:
    rows, tokens = shape
    if tokens > STEPS and _is_recurrent(anatomy):
        rows, tokens = rows * -(-tokens // STEPS), STEPS
    return inspect(anatomy, dtype=dtype, micro_batch_size=rows, max_seq_len=tokens, head_chunk_tokens=head_chunk_tokens)
