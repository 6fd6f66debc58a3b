"""Measures a recipe's own block and head, at its dtype and micro-batch: as much of them as time and memory allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fuyou_cli.core.units import gib
from fuyou_cli.spec.hardware import RatedKind
from fuyou_cli.spec.model import ITEM_SIZE, ModelSpec
from fuyou_cli.spec.plan import Numerics

from .findings import Found, seconds_of
from .stages import LEAST_TOKENS, Sample, block_of, head_alone, head_of, head_owner, layer_alone, timed

if TYPE_CHECKING:
    import torch

    from fuyou_cli.engine.anatomy import Anatomy

    from .stages import Alone

QUICK_PAIR, FULL_PAIR = 8.0, 40.0  # seconds of one forward and one backward that tokens are chosen for
SECONDS: dict[RatedKind, float] = {"block": 24.0, "head": 12.0}  # of all repeats, at least,
SEVERAL = 1.25  # times as long where micro-batches of several sizes take turns
USABLE = 0.8  # of the memory that is free


def measure_recipe(
    anatomy: Anatomy,
    sizes: Sequence[Numerics],
    device: torch.device,
    *,
    quick: bool,
    free: int,
    progress: Callable[[str], None] = lambda _: None,
) -> Found:
    """Measures one block and the head of the model, at the recipe's dtype and micro-batch; where that is to be chosen, at
    several `sizes`, the usual one first. `free`: bytes of memory there are to compute in. Where a stage takes too long or too
    much, fewer tokens are measured, of the usual size alone, and a note says so."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(sizes[0].torch_threads)
    seconds, free = QUICK_PAIR if quick else FULL_PAIR, int(free * USABLE)
    try:
        progress("the recipe's decoder block")
        block = _measured([_block(anatomy, numerics, device) for numerics in sizes], device, seconds=seconds, free=free)
        progress("the recipe's head")
        return block + _measured([_head(anatomy, numerics, device) for numerics in sizes], device, seconds=seconds, free=free)
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """A recipe's block or head. `make` makes it for a number of tokens, `tokens` of them as a run computes it."""

    kind: RatedKind
    numerics: Numerics
    hidden: int
    params: int
    tokens: int
    peak: int  # bytes that `tokens` take beside weights and gradients
    make: Callable[[int], Alone]

    @property
    def weights(self) -> int:
        """Counts bytes of weights and of their gradients' sum."""
        return self.params * (ITEM_SIZE[self.numerics.compute_dtype] + ITEM_SIZE[self.numerics.accumulate_dtype])


def _measured(stages: Sequence[_Stage], device: torch.device, *, seconds: float, free: int) -> Found:
    """Measures a stage at every size, as long as all of them fit in memory together: they take turns."""
    samples: list[Sample] = []
    notes: tuple[str, ...] = ()
    for stage in stages:
        sample, note = _sample(stage, device, seconds=seconds, free=free)
        if note and samples:  # a size beside the usual one: whole, or not at all
            continue
        if sample is not None:
            samples.append(sample)
            free -= stage.weights + stage.peak
        if note:
            notes = (note,)
            break
    if not samples:
        return Found(notes=notes)
    seconds = max(seconds, SECONDS[stages[0].kind]) * (SEVERAL if len(samples) > 1 else 1.0)
    return timed(samples, device, seconds=seconds) + Found(notes=notes)


def _sample(stage: _Stage, device: torch.device, *, seconds: float, free: int) -> tuple[Sample | None, str]:
    """Makes the stage to be timed, None where not even its weights fit, and a note unless it is all that a run computes at
    once."""
    if free <= stage.weights:
        needs = f"{gib(stage.weights)} of weights and gradients, {gib(free)} are free"
        return None, f"the recipe's {stage.kind} is not measured: it needs {needs}"
    numerics, alone = stage.numerics, _grown(stage, device, seconds=seconds, left=free - stage.weights)
    whole = alone.tokens == stage.tokens
    sample = Sample(
        alone=alone, kind=stage.kind, dtype=numerics.compute_dtype, hidden=stage.hidden, params=stage.params,
        tokens=numerics.micro_batch_size * numerics.max_seq_len if whole else alone.tokens,  # all chunks of one are alike
    )  # fmt: skip
    if whole:
        return sample, ""
    why = f"{stage.tokens} would take too long or too much memory here"
    return sample, f"the recipe's {stage.kind} is measured on {alone.tokens} tokens: {why}"


def _grown(stage: _Stage, device: torch.device, *, seconds: float, left: int) -> Alone:
    """Makes the stage for all its tokens, or for as many as can go forward and backward in `seconds` and in the bytes that are
    `left`."""
    tokens = min(stage.tokens, LEAST_TOKENS)
    while True:
        alone = stage.make(tokens)
        alone.forward()
        alone.backward()
        taken = seconds_of(alone.forward, device) + seconds_of(alone.backward, device)
        more = min(stage.tokens, 8 * tokens)
        while more > tokens and (taken * more / tokens > seconds or stage.peak * more / stage.tokens > left):
            more //= 2
        if more <= tokens:
            return alone
        tokens = more
        del alone  # its weights, before those of the next


def _block(anatomy: Anatomy, numerics: Numerics, device: torch.device) -> _Stage:
    inspected = _inspected(anatomy, numerics, (numerics.micro_batch_size, numerics.max_seq_len))
    block = block_of(inspected)

    def make(tokens: int) -> Alone:
        length = min(tokens, numerics.max_seq_len)
        shape = (tokens // length, length)
        return layer_alone(
            anatomy, _inspected(anatomy, numerics, shape), device, numerics.compute_dtype, shape, numerics.accumulate_dtype,
            micro_batches=-(-numerics.batch_size // numerics.micro_batch_size),
        )  # fmt: skip

    kept = sum(operator.bytes for operator in block.operators)  # held while they are given back
    return _Stage(
        kind="block", numerics=numerics, hidden=inspected.hidden_size, params=block.params, peak=block.backward_peak + kept,
        tokens=numerics.micro_batch_size * numerics.max_seq_len, make=make,
    )  # fmt: skip


def _head(anatomy: Anatomy, numerics: Numerics, device: torch.device) -> _Stage:
    shape = (numerics.micro_batch_size, numerics.max_seq_len)
    inspected = _inspected(anatomy, numerics, shape)
    whole = shape[0] * shape[1]
    at_once = min(numerics.head_chunk_tokens or whole, whole)

    def make(tokens: int) -> Alone:
        chunk = numerics.head_chunk_tokens if tokens == at_once else tokens
        dtypes = (numerics.compute_dtype, numerics.accumulate_dtype)
        return head_alone(anatomy, inspected, device, *dtypes, shape, chunk)

    return _Stage(
        kind="head", numerics=numerics, hidden=inspected.hidden_size, params=head_owner(inspected).params,
        peak=head_of(inspected).backward_peak, tokens=at_once, make=make,
    )  # fmt: skip


def _inspected(anatomy: Anatomy, numerics: Numerics, shape: tuple[int, int]) -> ModelSpec:
    from fuyou_cli.engine.inspect import inspect

    return inspect(
        anatomy, dtype=numerics.compute_dtype, micro_batch_size=shape[0], max_seq_len=shape[1],
        head_chunk_tokens=numerics.head_chunk_tokens,
    )  # fmt: skip
