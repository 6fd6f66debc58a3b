"""Checks limits: the model's positions, the token ids that have an embedding, and the device's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.errors import UsageError
from ..core.units import MiB
from ..engine.processor import has_fast_bfloat16

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..data.rows import DataSummary
    from ..recipe.schema import Recipe
    from ..spec.hardware import HardwareProfile

_UNPLANNED_OF_A_GPU = 0.05
_LEAST_UNPLANNED = 128 * MiB  # cuBLAS alone has 32 MiB for its own use, however little a run may use
_POSITION_OFFSET = 2  # extra rows that a table of positions may have (OPT's padding)


def check_positions(recipe: Recipe, limit: int | None, learned: bool, say: Callable[[str], None]) -> None:
    """Refuses rows longer than a table of `limit` positions. Warns if positions are computed (rotary, ALiBi)."""
    length = recipe.dataset.max_seq_len
    if limit is None or length <= limit:
        return
    beyond = f"dataset.max_seq_len: {length:,} is more than the {limit:,} positions of {recipe.model.name_or_path}"
    if learned:
        raise UsageError(f"{beyond}, which has a table of them", hint=f"use at most {limit}")
    say(f"warning: {beyond} (max_position_embeddings): the model was not trained on rows this long")


def positions_of(model: PreTrainedModel) -> tuple[int | None, bool]:
    """Returns the positions that a model's configuration allows, None without a limit, and whether there is a table of them:
    learned, or made once (GPT-J, CodeGen)."""
    from torch import nn

    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None, False
    if any(name.endswith(".embed_positions") and len(table) == limit for name, table in model.named_buffers()):
        return limit, True
    tokens = model.get_input_embeddings()
    return limit, any(
        isinstance(module, nn.Embedding) and module is not tokens and 0 <= module.num_embeddings - limit <= _POSITION_OFFSET
        for module in model.modules()
    )


def note_slow_products(recipe: Recipe, device: str, say: Callable[[str], None]) -> None:
    """Says where products of bfloat16 matrices are slow: torch has fast ones for processors with AVX-512 or better only."""
    if device == "cpu" and recipe.precision.compute == "bfloat16" and not has_fast_bfloat16():
        say("note: without AVX-512 a processor computes bfloat16 slowly; precision.compute=float32 is several times faster")


def check_tokens(recipe: Recipe, vocabulary: int, summary: DataSummary) -> None:
    """Refuses token ids without one of the model's `vocabulary` embeddings, including the id that pads short rows."""
    name = recipe.tokenizer.name_or_path or recipe.model.name_or_path
    for what, number in (("token", summary.highest_token_id), ("padding", summary.pad_id)):
        if number >= vocabulary:
            raise UsageError(
                f"the tokenizer of {name} gives the {what} id {number:,}, but {recipe.model.name_or_path} has only "
                f"embeddings for ids below {vocabulary:,}",
                hint="check that tokenizer.name_or_path and tokenizer.pad_token belong to this model",
            )


def gpu_limit(recipe: Recipe, hardware: HardwareProfile) -> int | None:
    """Returns the bytes that a plan may use of a device with its own memory."""
    most = gpu_most(recipe, hardware)
    return most if most is None or hardware.device != "cuda" else for_tensors(most)


def for_tensors(memory: int) -> int:
    """Returns what tensors may take of so many bytes of a GPU: its allocator loses some to fragments, libraries some."""
    return max(0, int(memory - max(_UNPLANNED_OF_A_GPU * memory, _LEAST_UNPLANNED)))


def gpu_most(recipe: Recipe, hardware: HardwareProfile) -> int | None:
    """Returns the bytes of device memory that the process may use, without its context and the memory of other processes."""
    asked, there = recipe.offload.max_memory.gpu, hardware.device_memory
    if hardware.device == "cpu" or (asked.is_auto and not there):
        return None
    free = hardware.device_free or there  # nothing else uses a described device
    limit = asked.resolve(total=there, auto=free)
    return min(limit, free) if there else limit
