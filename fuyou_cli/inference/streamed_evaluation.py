"""Evaluates a model larger than memory without a run: its weights pass through memory, forward alone, for as many rows at
once as have room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fuyou_cli.checkpoint.reader import PIECE
from fuyou_cli.core.errors import PlanError
from fuyou_cli.core.heap import settle_for_training
from fuyou_cli.core.units import align_up, gib
from fuyou_cli.engine.describe import Outlined, specified
from fuyou_cli.engine.isolated import kept_apart_if_possible
from fuyou_cli.engine.row_lengths import turns
from fuyou_cli.engine.skeleton import TORCH_DTYPE
from fuyou_cli.engine.streamed_losses import StreamedLosses
from fuyou_cli.engine.weight_stream import Visited
from fuyou_cli.planner.memory import code_bytes
from fuyou_cli.spec.model import Dtype
from fuyou_cli.spec.plan import Numerics
from fuyou_cli.training.exporting import READ_ARENA
from fuyou_cli.training.inference import FoundModel, Opened, open_for_inference
from fuyou_cli.training.numerics import USUAL_TOKENS, division, head_chunk

if TYPE_CHECKING:
    from fuyou_cli.recipe.schema import TrainSection

_OF_ROWS = 96  # bytes per token beside boundaries: ids, labels, targets, and what the loss folds
_SHARE = 4  # of what is left, rows get at most one such part while weights do not all fit


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationMemory:
    """Says how an evaluation uses its memory, in bytes. `numerics`: its batch is what has room in one pass."""

    budget: int
    numerics: Numerics
    weights: int
    device_weights: int  # in the device's own memory; 0: one stage at a time, or a device that computes in RAM


def room_of(
    found: FoundModel, train: TrainSection, *, max_len: int, budget: int, process: int, rows: int, longest: int,
    device: int | None = None,
) -> EvaluationMemory:  # fmt: skip
    """Divides a budget of host memory among weights and rows, and `device` bytes of a device that has its own. `process`: bytes
    that the process has before. `rows`: in all, `longest`: tokens of the longest one, of which at most `max_len` are kept.
    Raises PlanError if either is too little for one micro-batch."""
    length = min(align_up(longest, 8), max_len)
    # A row whose positions depend on its length is alone, as in a model that is given one row.
    micro = 1 if turns(found.anatomy.model) else min(rows, max(1, USUAL_TOKENS // length))
    found = replace(found, anatomy=kept_apart_if_possible(found.anatomy))
    first, end = found.anatomy.stages[0].vocabulary or (0, found.anatomy.model.config.get_text_config().vocab_size)
    chunk = head_chunk(train, micro * length, end - first)
    model = specified(
        Outlined(anatomy=found.anatomy, refusal=None),
        dtype=found.dtype,
        micro_batch_size=micro,
        max_seq_len=length,
        head_chunk_tokens=chunk,
    )
    dtype: Dtype = "bfloat16" if found.dtype == "bfloat16" else "float32"
    numerics = Numerics(
        compute_dtype=dtype, accumulate_dtype=dtype, batch_size=micro, micro_batch_size=micro, max_seq_len=length,
        head_chunk_tokens=chunk, torch_threads=1, seed=0,
        **division(apart=found.anatomy.isolated, on_cpu=device is None, dtype=dtype, micro=micro, length=length),
    )  # fmt: skip
    widths = -(-numerics.widest // numerics.width_step) if device is None else 1
    visited = Visited.of(found.anatomy, TORCH_DTYPE[found.dtype])
    per_token = 2 * model.boundary_bytes_per_token + model.choreography_bytes_per_token + _OF_ROWS
    least = micro * length * per_token
    peak = max(stage.forward_peak for stage in model.stages)
    computing = peak + READ_ARENA + PIECE + (code_bytes(model, numerics, widths=widths, trains=False) if widths > 1 else 0)
    left = budget - process - computing
    free = left - visited.least
    if free < least:
        needed, weights = gib(budget - free + least), gib(visited.least)
        raise PlanError(
            f"the evaluation needs {needed} of RAM: {gib(process)} of the process, {weights} of weights at once, "
            f"{gib(computing + least)} of one micro-batch; offload.max_memory.cpu allows {gib(budget)}",
            hint="raise it, lower dataset.max_seq_len, or compute in bfloat16",
        )
    most = max(least, min(free, left // _SHARE), left - visited.whole)
    at_once = min(rows, most // (length * per_token) // micro * micro) or micro
    device_weights = 0
    if device is not None:
        # The output of a lookup is there of all rows at once, before it comes to RAM.
        of_row = length * (model.boundary_bytes_per_token + _OF_ROWS)
        spare = device - peak - visited.largest - least
        at_once = min(at_once, _rows_on_device(spare, micro, of_row))
        device_weights = spare - at_once * of_row + visited.largest
    return EvaluationMemory(
        budget=budget,
        numerics=replace(numerics, batch_size=at_once),
        weights=left - at_once * length * per_token,
        device_weights=device_weights,
    )


def _rows_on_device(spare: int, micro: int, of_row: int) -> int:
    """Returns how many rows may be on the device at once, in whole micro-batches, which get at most one share of `spare`."""
    if spare < micro * of_row:
        raise PlanError(
            f"the evaluation needs {gib(micro * of_row - spare)} of GPU memory more than is free",
            hint="lower dataset.max_seq_len, compute in bfloat16, raise offload.max_memory.gpu, or add offload.device=cpu",
        )
    return max(micro, spare // _SHARE // of_row // micro * micro)


@contextmanager
def open_losses(
    found: FoundModel, room: EvaluationMemory, *, device: str, say: Callable[[str], None] | None = None
) -> Iterator[tuple[Opened, StreamedLosses]]:
    """Opens a model's weights, and what computes losses with them, in the memory of `room`. `device`: cpu or cuda."""
    where = torch.device("cuda" if device == "cuda" else "cpu")
    settle_for_training()  # else each activation is mapped on its own: a quarter of the time went to page faults
    found = replace(found, anatomy=kept_apart_if_possible(found.anatomy))
    with (
        open_for_inference(found, memory=room.weights, device=where, device_memory=room.device_weights, say=say) as opened,
        StreamedLosses(opened.weights, room.numerics) as losses,
    ):
        yield opened, losses
