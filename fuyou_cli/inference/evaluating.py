"""Evaluates a model that passes through memory: on a recipe's eval sets."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from fuyou_cli.checkpoint.hub import Progress, resolve
from fuyou_cli.core import probe
from fuyou_cli.core.errors import UsageError
from fuyou_cli.core.paths import expanded
from fuyou_cli.data.rows import Rows
from fuyou_cli.recipe.schema import Recipe
from fuyou_cli.training.evaluation import evaluated
from fuyou_cli.training.inference import FoundModel, find, memory_of
from fuyou_cli.training.length import cache_of, evaluation_rows
from fuyou_cli.training.numerics import check_positions, check_tokens, positions_of
from fuyou_cli.training.prepare import device_name, warm_up
from fuyou_cli.training.report import EvalReport

from .streamed_evaluation import open_losses, room_of

Say = Callable[[str], None]
Bar = Callable[[int], AbstractContextManager[Callable[[int], None]]]  # of so many rows; told how many more are done


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


def evaluate(source: str, recipe: Recipe, *, say: Say, progress: Progress, bar: Bar) -> ModelEvaluation:
    """Evaluates the model of `source`, a folder or hub name, a run's store, or a run's output folder, on the recipe's sets."""
    if (device := device_name(recipe)) == "cuda" and not torch.cuda.is_available():
        raise UsageError("offload.device: torch finds no CUDA device on this machine", hint="add offload.device=cpu")
    found = _find(source, recipe, say, progress)
    warm_up(recipe)
    with ExitStack() as stack:
        sets = _rows(recipe, found, stack, say)
        budget = recipe.offload.max_memory.cpu.resolve(
            total=probe.memory_limit(), auto=int((probe.memory_available() + probe.process_bytes()) * 0.9)
        )
        room = room_of(
            found, recipe.train, max_len=recipe.dataset.max_seq_len, budget=budget, process=probe.process_bytes(),
            rows=max(map(len, sets.values())), longest=max(rows.summary.longest_row for rows in sets.values()),
            device=memory_of(torch.device(device), recipe.offload.max_memory.gpu),
        )  # fmt: skip
        opened, losses = stack.enter_context(open_losses(found, room, device=device, say=say))
        *_, last = sets
        with bar(sum(map(len, sets.values()))) as advance:
            reports = [
                evaluated(name, rows, losses.losses, room.numerics, last=name == last, progress=advance)
                for name, rows in sets.items()
            ]
        opened.check()
        return ModelEvaluation(
            sets=reports, dtype=found.dtype, budget=budget, weights=opened.weights.memory, passes=losses.passes,
            read_bytes=opened.read_bytes(),
            parameters=sum(tensor.numel for stage in found.anatomy.stages for tensor in stage.tensors),
        )  # fmt: skip


def _find(source: str, recipe: Recipe, say: Say, progress: Progress) -> FoundModel:
    """Finds the model; one of the hub is fetched, as of a recipe's model."""
    model, trusted = expanded(source, key="MODEL"), recipe.model.trust_remote_code
    if model.suffix in (".yaml", ".yml"):
        raise UsageError(f"{source} is a recipe, not a model", hint="fuyou eval MODEL RECIPE")
    if not model.is_dir():
        model = resolve(source, trust_remote_code=trusted, say=say, progress=progress)
    dtype = recipe.precision.compute
    assert dtype != "float16", "a recipe's rules refuse it"
    return find(model, dtype=dtype, attention=recipe.model.attn_implementation, trusted=trusted)


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
    sets = evaluation_rows(recipe, _tokenizer_dir(recipe, found, say), cache=cache, say=say)
    vocabulary = int(found.anatomy.model.get_input_embeddings().weight.shape[0])
    for rows in sets.values():
        check_tokens(recipe, vocabulary, rows.summary)
        for note in rows.summary.notes:
            say(f"note: {note}")
    return sets


def _tokenizer_dir(recipe: Recipe, found: FoundModel, say: Say) -> Path:
    """Returns the folder of the recipe's tokenizer, or of the model's own."""
    named = recipe.tokenizer.name_or_path
    return found.folder if named is None else resolve(named, tokenizer_only=True, say=say)
