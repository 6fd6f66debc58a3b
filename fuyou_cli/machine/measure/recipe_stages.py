"""Measures a recipe's own block and head, at its dtype and micro-batch: as much of them as time and memory allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fuyou_cli.core.units import gib
from fuyou_cli.spec.hardware import RatedKind
from fuyou_cli.spec.plan import Numerics

from ..allocator import trim
from .findings import Findings, seconds_of
from .stages import LEAST_TOKENS, RunStage, Sample, block_stage, head_stage, timed

if TYPE_CHECKING:
    import torch

    from fuyou_cli.engine.anatomy import Anatomy

    from .stages import Alone

QUICK_PAIR, FULL_PAIR = 8.0, 40.0  # seconds of one forward and one backward that tokens are chosen for
SECONDS: dict[RatedKind, float] = {"block": 24.0, "head": 8.0}  # of all repeats, at least,
GPU_SHARE = 0.15  # of those seconds: other programs do not slow a GPU down, and a repeat takes it milliseconds
SEVERAL = 1.25  # times as long where micro-batches of several sizes take turns
USABLE = 0.8  # of the memory that is free; copies of a small block take of the rest


def measure_recipe(
    anatomy: Anatomy,
    sizes: Sequence[Numerics],
    device: torch.device,
    *,
    quick: bool,
    free: int,
    compiled: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Findings:
    """Measures one block and the head at the recipe's dtype, at one micro-batch or several `sizes`, the usual one first. A
    `compiled` block is measured at the usual size alone.

    `free`: bytes of memory there are to compute in. Where a stage takes too long or too much, fewer tokens of the usual size
    are measured, and a note says so."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(sizes[0].torch_threads)
    seconds, free, rest = QUICK_PAIR if quick else FULL_PAIR, int(free * USABLE), int(free * (1 - USABLE))
    found = Findings()
    try:
        block = partial(block_stage, compiled=compiled, room=rest // len(sizes))
        for name, stage, of in (("decoder block", block, sizes[:1] if compiled else sizes), ("head", head_stage, sizes)):
            progress(f"the recipe's {name}")
            trim()  # what the measurements before this have freed is part of `free`
            stages = [stage(anatomy, numerics, device) for numerics in of]
            found += _measured(stages, device, seconds=seconds, free=free)
    finally:
        torch.set_num_threads(threads)
    return found


def _measured(stages: Sequence[RunStage], device: torch.device, *, seconds: float, free: int) -> Findings:
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
        return Findings(notes=notes)
    seconds = max(seconds, SECONDS[stages[0].kind]) * (SEVERAL if len(samples) > 1 else 1.0)
    seconds *= GPU_SHARE if device.type == "cuda" else 1.0
    return timed(samples, device, seconds=seconds) + Findings(notes=notes)


def _sample(stage: RunStage, device: torch.device, *, seconds: float, free: int) -> tuple[Sample | None, str]:
    """Makes the stage to be timed, None where its weights do not fit, and a note unless it is all of a run's."""
    if free <= stage.weights:
        needs = f"{gib(stage.weights)} of weights and gradients, {gib(free)} are free"
        return None, f"the recipe's {stage.kind} is not measured: it needs {needs}"
    numerics, alone = stage.numerics, _grown(stage, device, seconds=seconds, left=free - stage.weights)
    if alone.tokens == stage.tokens:  # of a micro-batch, whose chunks are alike
        return Sample(stage=stage, alone=alone, tokens=numerics.micro_batch_size * numerics.max_seq_len), ""
    why = f"{stage.tokens} would take too long or too much memory here" + (", so it is not compiled" if stage.compiles else "")
    sample = Sample(stage=stage, alone=alone, tokens=alone.tokens)
    return sample, f"the recipe's {stage.kind} is measured on {alone.tokens} tokens: {why}"


def _grown(stage: RunStage, device: torch.device, *, seconds: float, left: int) -> Alone:
    """Makes the stage for as many of its tokens as go forward and backward in `seconds` and in the bytes that are `left`."""
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
