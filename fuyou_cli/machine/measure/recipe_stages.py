"""Measures a recipe's own block and head, at its dtype and micro-batch: as much of them as time and memory allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fuyou_cli.core.heap import trim
from fuyou_cli.core.units import gib
from fuyou_cli.spec.hardware import RatedKind
from fuyou_cli.spec.plan import Numerics

from .findings import Findings, seconds_of
from .stages import LEAST_TOKENS, RunStage, Sample, block_stage, head_stage, timed

if TYPE_CHECKING:
    import torch

    from fuyou_cli.engine.anatomy import Anatomy

    from .stages import Alone

QUICK_PAIR, FULL_PAIR = 4.0, 40.0  # seconds of one forward and one backward of all shapes together that are timed
SECONDS: dict[RatedKind, float] = {"block": 14.0, "head": 6.0}  # of all repeats, at least,
GPU_SHARE = 0.15  # of those seconds: other programs do not slow a GPU down, and a repeat takes it milliseconds
USABLE = 0.8  # of the memory that is free; copies of a small block take of the rest


def measure_recipe(
    anatomy: Anatomy,
    sizes: Sequence[Numerics],
    device: torch.device,
    *,
    quick: bool,
    free: int,
    compiled: bool = False,
    layers: str = "",
    progress: Callable[[str], None] = lambda _: None,
) -> Findings:
    """Measures one block and the head at the recipe's dtype, at micro-batches of these `sizes`, those first that count most. A
    `compiled` block is measured at the first size alone. `layers`: what they are measured for (`StageRate`).

    `free`: bytes of memory there are to compute in. Where the first size takes too long or too much, fewer tokens of it are
    measured, and a note says so; another is then left out."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(sizes[0].torch_threads)
    seconds, free, rest = QUICK_PAIR if quick else FULL_PAIR, int(free * USABLE), int(free * (1 - USABLE))
    found = Findings()
    try:
        block = partial(block_stage, compiled=compiled, room=rest)
        for name, stage, of in (("decoder block", block, sizes[:1] if compiled else sizes), ("head", head_stage, sizes)):
            progress(f"the recipe's {name}")
            trim()  # what the measurements before this have freed is part of `free`
            stages = _unlike([stage(anatomy, numerics, device) for numerics in of])
            found += _measured(stages, device, seconds=seconds, free=free, layers=layers)
    finally:
        torch.set_num_threads(threads)
    return found


def _unlike(stages: Sequence[RunStage]) -> list[RunStage]:
    """Leaves out heads that compute the same piece as one before."""
    found = dict[tuple[int, int], RunStage]()
    for stage in stages:
        found.setdefault((stage.tokens, stage.numerics.max_seq_len * (stage.kind == "block")), stage)
    return list(found.values())


def _measured(stages: Sequence[RunStage], device: torch.device, *, seconds: float, free: int, layers: str) -> Findings:
    """Measures a stage at every size, as long as all of them fit in memory and in the `seconds` of a turn together."""
    first = stages[0]
    if free <= first.weights:
        needs = f"{gib(first.weights)} of weights and gradients, {gib(free)} are free"
        return Findings(notes=(f"the recipe's {first.kind} is not measured: it needs {needs}",))
    free -= first.weights
    alone, taken = _grown(first, device, seconds=seconds, left=free)
    notes: tuple[str, ...] = ()
    tokens = first.numerics.micro_batch_size * first.numerics.max_seq_len  # of a micro-batch, whose chunks are alike
    if alone.tokens < first.tokens:
        tokens = alone.tokens
        why = f"{first.tokens} would take too long or too much memory here" + (
            ", so it is not compiled" if first.compiles else ""
        )
        notes = (f"the recipe's {first.kind} is measured on {tokens} tokens: {why}",)
    samples, pace = [Sample(stage=first, alone=alone, tokens=tokens, layers=layers)], taken / alone.tokens
    seconds, free = seconds - taken, free - first.peak
    for stage in stages[1:] if not notes else ():
        if stage.tokens * pace > seconds or stage.peak > free:
            continue
        whole = stage.numerics.micro_batch_size * stage.numerics.max_seq_len
        samples.append(Sample(stage=stage, alone=stage.make(stage.tokens, alone), tokens=whole, layers=layers))
        seconds, free = seconds - stage.tokens * pace, free - stage.peak
    share = GPU_SHARE if device.type == "cuda" else 1.0
    return timed(samples, device, seconds=SECONDS[first.kind] * share) + Findings(notes=notes)


def _grown(stage: RunStage, device: torch.device, *, seconds: float, left: int) -> tuple[Alone, float]:
    """Makes the stage for as many of its tokens as go forward and backward in `seconds` and in the bytes that are `left`.
    Returns it with the seconds it takes."""
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
            return alone, taken
        tokens = more
        del alone  # its weights, before those of the next
