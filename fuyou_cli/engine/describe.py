"""What there is to plan with about a model, whether or not the engine can train it.

`fuyou plan` answers for every causal language model whose configuration can be built. Where `dissect` or `inspect`
refuses, the stages are outlined and their costs estimated, and the refusal is told beside the plan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..core.errors import UsageError
from ..spec.model import ModelSpec
from .anatomy import Anatomy, dissect, outline
from .estimate import estimate
from .experts import Mixture
from .inspect import inspect
from .skeleton import build
from .vocabulary import cut_vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlined:
    """Stages, and why they cannot be trained yet; None where nothing is known against it."""

    anatomy: Anatomy
    refusal: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Described:
    """A specification to plan with, and why the model cannot be trained yet; None where it can."""

    model: ModelSpec
    refusal: str | None


def outlined(model: PreTrainedModel, *, strict: bool = False) -> Outlined:
    """The stages of any model with blocks. `strict`: raises the UsageError of a model that cannot be trained."""
    try:
        return Outlined(anatomy=dissect(model), refusal=None)
    except UsageError as error:
        if strict:
            raise
        return Outlined(anatomy=outline(model), refusal=error.message)


def specified(
    known: Outlined, *, dtype: str, micro_batch_size: int, max_seq_len: int, head_chunk_tokens: int, strict: bool = False
) -> Described:
    """The specification at micro-batches of (micro_batch_size, max_seq_len). `strict`: as in `outlined`."""
    anatomy, refusal = known.anatomy, known.refusal
    shape = (micro_batch_size, max_seq_len)
    if refusal is None:
        try:
            model = inspect(
                anatomy,
                dtype=dtype,
                micro_batch_size=micro_batch_size,
                max_seq_len=max_seq_len,
                head_chunk_tokens=head_chunk_tokens,
            )
            return Described(model=_counted(model, anatomy), refusal=None)
        except UsageError as error:
            if strict:
                raise
            refusal = error.message
    model = estimate(anatomy, dtype=dtype, shape=shape, head_chunk_tokens=head_chunk_tokens)
    return Described(model=_counted(model, anatomy), refusal=refusal)


def describe(
    config: PreTrainedConfig,
    *,
    dtype: str,
    micro_batch_size: int,
    max_seq_len: int,
    head_chunk_tokens: int = 0,
    vocabulary_rows: int = 0,
    attention: str = "sdpa",
) -> Described:
    """All of it in one: `vocabulary_rows` other than 0 must be what the model allows (`vocabulary.resolved_rows`).

    Raises UsageError when no model can be built of `config`, or it has no blocks.
    """
    known = outlined(build(config, dtype=dtype, attention=attention))
    return specified(
        replace(known, anatomy=cut_vocabulary(known.anatomy, vocabulary_rows)),
        dtype=dtype,
        micro_batch_size=micro_batch_size,
        max_seq_len=max_seq_len,
        head_chunk_tokens=head_chunk_tokens,
    )


def _counted(model: ModelSpec, anatomy: Anatomy) -> ModelSpec:
    """With the counts that neither costs nor stages show."""
    mixture = Mixture.of(anatomy.model.config.get_text_config())
    return replace(
        model,
        inactive_parameters=sum(mixture.inactive(stage.tensors) for stage in model.stages),
        float32_parameters=_kept_in_float32(anatomy.model) if model.compute_dtype == "bfloat16" else 0,
    )


def _kept_in_float32(model: PreTrainedModel) -> int:
    """Elements of the parameters that a bfloat16 model of this family has in float32: made so, or listed by its class as
    parts of names, with `*` for a number."""
    listed = [re.compile(re.escape(part).replace(r"\*", ".*")) for part in model._keep_in_fp32_modules_strict or ()]
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.dtype == torch.float32 or any(part.search(name) for part in listed)
    )
