"""Evaluates a model that passes through memory on a recipe's eval sets: forward alone, as many rows at once as have room."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fuyou_cli.checkpoint.hub import Progress, resolve
from fuyou_cli.core import probe
from fuyou_cli.core.errors import PlanError, UsageError
from fuyou_cli.core.process import settle_for_training
from fuyou_cli.core.units import align_up, gib
from fuyou_cli.data.rows import Rows
from fuyou_cli.engine.anatomy import kept_apart_if_possible
from fuyou_cli.engine.attention import turns
from fuyou_cli.engine.describe import Outlined, specified
from fuyou_cli.engine.forward_only import StreamedLosses, Visited
from fuyou_cli.engine.skeleton import TORCH_DTYPE
from fuyou_cli.planner.memory import code_bytes
from fuyou_cli.recipe.schema import Recipe
from fuyou_cli.spec.model import Dtype
from fuyou_cli.spec.plan import Numerics
from fuyou_cli.training.evaluation import evaluated
from fuyou_cli.training.known_model import warm_up
from fuyou_cli.training.length import cache_of, evaluation_rows
from fuyou_cli.training.numerics import USUAL_TOKENS, check_positions, check_tokens, divided, head_chunk, positions_of
from fuyou_cli.training.prepare import device_name
from fuyou_cli.training.report import EvalReport

from .models import Budget, FoundModel, Opened, cut_to_fit, open_for_inference, open_source

if TYPE_CHECKING:
    from fuyou_cli.recipe.schema import TrainSection

Say = Callable[[str], None]
ProgressBar = Callable[[int], AbstractContextManager[Callable[[int], None]]]  # of so many rows; told how many more are done


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelEvaluation:
    """The loss of a model on each set, and what computing it took."""

    sets: list[EvalReport]
    dtype: str
    parameters: int
    passes: int
    read_bytes: int
    budget: int
    weights: int  # bytes of RAM


def evaluate(source: str, recipe: Recipe, *, say: Say, progress: Progress, bar: ProgressBar) -> ModelEvaluation:
    """Evaluates the model of `source`, a folder or hub name, a run's store, or a run's output folder, on the recipe's sets."""
    if (device := device_name(recipe)) == "cuda" and not torch.cuda.is_available():
        raise UsageError("offload.device: torch finds no CUDA device on this machine", hint="add offload.device=cpu")
    if source.endswith((".yaml", ".yml")):
        raise UsageError(f"{source} is a recipe, not a model", hint="fuyou eval MODEL RECIPE")
    dtype = recipe.precision.compute
    found = open_source(
        source, dtype=dtype, attention=recipe.model.attn_implementation, trusted=recipe.model.trust_remote_code, say=say,
        progress=progress,
    )  # fmt: skip
    warm_up(recipe)
    with ExitStack() as stack:
        sets = _rows(recipe, found, stack, say)
        ram = recipe.offload.max_memory.cpu.resolve(
            total=probe.memory_limit(), auto=int((probe.memory_available() + probe.process_bytes()) * 0.9)
        )
        room = room_of(
            found, recipe.train, Budget.now(ram, torch.device(device), recipe.offload.max_memory.gpu),
            max_len=recipe.dataset.max_seq_len, rows=max(map(len, sets.values())),
            longest=max(rows.summary.longest_row for rows in sets.values()),
        )  # fmt: skip
        opened, losses = stack.enter_context(open_losses(room, device=device, say=say))
        *_, last = sets
        with bar(sum(map(len, sets.values()))) as advance:
            reports = [
                evaluated(name, rows, losses.losses, room.numerics, last=name == last, progress=advance)
                for name, rows in sets.items()
            ]
        opened.check()
        return ModelEvaluation(
            sets=reports, dtype=found.dtype, budget=ram, weights=opened.weights.memory, passes=losses.passes,
            read_bytes=opened.read_bytes(),
            parameters=sum(tensor.numel for stage in found.anatomy.stages for tensor in stage.tensors),
        )  # fmt: skip


def _rows(recipe: Recipe, found: FoundModel, stack: ExitStack, say: Say) -> dict[str, Rows]:
    """Returns the sets, tokenised for this model: found where a run has made them, else made in a folder that is removed."""
    if not (recipe.dataset.eval or recipe.dataset.eval_fraction):
        raise UsageError(
            "the recipe has nothing to evaluate",
            hint="name files in dataset.eval, or set dataset.eval_fraction of dataset.train",
        )
    check_positions(recipe, *positions_of(found.anatomy.model), say)
    cache = cache_of(recipe)
    if not cache.is_dir():
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fuyou-rows-")))
    say("reading and tokenising the data")
    named = recipe.tokenizer.name_or_path
    tokenizer_dir = found.folder if named is None else resolve(named, tokenizer_only=True, say=say)
    sets = evaluation_rows(recipe, tokenizer_dir, cache=cache, say=say)
    vocabulary = int(found.anatomy.model.get_input_embeddings().weight.shape[0])
    for rows in sets.values():
        check_tokens(recipe, vocabulary, rows.summary)
        for note in rows.summary.notes:
            say(f"note: {note}")
    return sets


# ---- memory --------------------------------------------------------------------------------------------------------------


_OF_ROWS = 96  # bytes per token beside boundaries: ids, labels, targets, and what the loss folds
_SHARE = 4  # of what is left, rows get at most one such part while weights do not all fit


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationMemory:
    """How an evaluation uses its memory, in bytes. `found`: the model as it is computed, perhaps with blocks cut into ranges of
    experts. `numerics`: its batch is what has room in one pass."""

    found: FoundModel
    numerics: Numerics
    weights: int
    device_weights: int  # in the device's own memory; 0: one stage at a time, or a device that computes in RAM


def room_of(
    found: FoundModel, train: TrainSection, budget: Budget, *, max_len: int, rows: int, longest: int
) -> EvaluationMemory:
    """Divides a budget among weights and rows. `rows`: in all, `longest`: tokens of the longest one, of which at most `max_len`
    are kept. Raises PlanError if there is too little for one micro-batch."""
    device = budget.device
    length = min(align_up(longest, 8), max_len)
    # A row whose positions depend on its length is alone, as in a model that is given one row.
    micro = 1 if turns(found.anatomy.model) else min(rows, max(1, USUAL_TOKENS // length))
    found = replace(found, anatomy=kept_apart_if_possible(found.anatomy))
    first, end = found.anatomy.stages[0].vocabulary or (0, found.anatomy.model.config.get_text_config().vocab_size)
    chunk = head_chunk(train, micro * length, end - first)
    sizes = {"micro_batch_size": micro, "max_seq_len": length, "head_chunk_tokens": chunk}
    model = specified(Outlined(anatomy=found.anatomy, refusal=None), dtype=found.dtype, **sizes)
    dtype: Dtype = "bfloat16" if found.dtype == "bfloat16" else "float32"
    numerics = Numerics(
        compute_dtype=dtype, accumulate_dtype=dtype, batch_size=micro, micro_batch_size=micro,
        max_seq_len=length, head_chunk_tokens=chunk, torch_threads=1, seed=0,
    )  # fmt: skip
    numerics = divided(numerics, apart=found.anatomy.isolated, on_cpu=device is None)
    widths = -(-numerics.widest // numerics.width_step) if device is None else 1
    visited = Visited.of(found.anatomy, TORCH_DTYPE[found.dtype])
    per_token = 2 * model.boundary_bytes_per_token + model.choreography_bytes_per_token + _OF_ROWS
    if model.has_ranges:  # what a block sends to its experts, and float32 sums of what they return
        per_token += model.sent_bytes_per_token + 4 * model.hidden_size
    least = micro * length * per_token
    peak = max(stage.forward_peak for stage in model.stages)
    left = budget.for_weights(found, peak + (code_bytes(model, numerics, widths=widths, trains=False) if widths > 1 else 0))
    if visited.least > left - least and (cut := cut_to_fit(found, left - 2 * least)).anatomy is not found.anatomy:
        return room_of(cut, train, budget, max_len=max_len, rows=rows, longest=longest)
    free = left - visited.least
    if free < least:
        needed, weights, computing = gib(budget.ram - free + least), gib(visited.least), budget.ram - budget.process - left
        raise PlanError(
            f"the evaluation needs {needed} of RAM: {gib(budget.process)} of the process, {weights} of weights at once, "
            f"{gib(computing + least)} of one micro-batch; offload.max_memory.cpu allows {gib(budget.ram)}",
            hint="raise it, lower dataset.max_seq_len, or compute in bfloat16",
        )
    most = max(least, min(free, left // _SHARE), left - visited.total_bytes)
    at_once = min(rows, most // (length * per_token) // micro * micro) or micro
    device_weights = 0
    if device is not None:
        # The output of a lookup is there of all rows at once, before it comes to RAM.
        of_row = length * (model.boundary_bytes_per_token + _OF_ROWS)
        spare = device - peak - visited.largest - least
        at_once = min(at_once, _rows_on_device(spare, micro, of_row))
        device_weights = spare - at_once * of_row + visited.largest
    return EvaluationMemory(
        found=found, numerics=replace(numerics, batch_size=at_once), weights=left - at_once * length * per_token,
        device_weights=device_weights,
    )  # fmt: skip


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
    room: EvaluationMemory, *, device: str, say: Callable[[str], None] | None = None
) -> Iterator[tuple[Opened, StreamedLosses]]:
    """Opens the weights of a model, and what computes losses with them, in the memory of `room`. `device`: cpu or cuda."""
    where = torch.device("cuda" if device == "cuda" else "cpu")
    settle_for_training()  # else each activation is mapped on its own: a quarter of the time went to page faults
    with (
        open_for_inference(room.found, memory=room.weights, device=where, device_memory=room.device_weights, say=say) as opened,
        StreamedLosses(opened.weights, room.numerics) as losses,
    ):
        yield opened, losses
