"""Measures stages through the code that a run uses: here decoder layers and heads of a few widths."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from fuyou_cli.core.units import count
from fuyou_cli.spec.hardware import RatedKind, StageRate
from fuyou_cli.spec.model import Dtype, ModelSpec, StageSpec

from ..allocator import trim
from .findings import DTYPES, Found, Rate, each, rate_of, seconds_of

if TYPE_CHECKING:
    import torch

    from fuyou_cli.engine.alone import BlockAlone, HeadAlone
    from fuyou_cli.engine.anatomy import Anatomy

    Alone = BlockAlone | HeadAlone

WIDTHS = (1024, 2048, 512)  # in this order: when time runs out, the last are left out; a head is measured at the first
GPU_WIDTHS = (4096, 2048, 1024)  # narrower ones only show how long a launch takes
HEAD_ROWS = 8192
LAYER_FLOPS = 2.0 * 11  # per token and square of the width, forward: close enough to choose the number of tokens by
ACCUMULATE: Dtype = "float32"
LEAST_TOKENS, MOST_TOKENS, MOST_GPU_TOKENS = 64, 512, 8192
ROW_TOKENS = 1024  # of a row at most: more tokens are more rows
QUICK_SECONDS, FULL_SECONDS = 2.5, 40.0  # of all layers of a few widths together
QUICK_PAIR, FULL_PAIR = 0.3, 2.0  # of one forward and one backward that tokens are chosen for
TURNS = 8  # of forward, backward, ... each, about


# ---- layers of a few widths ------------------------------------------------------------------------------------------


def measure_layers(device: torch.device, matmul: dict[Dtype, Rate], *, quick: bool) -> Found:
    """Measures Llama layers of a few widths and a small head, in both dtypes: as many as there is time for, the layers of the
    first width in any case."""
    widths, most = (GPU_WIDTHS, MOST_GPU_TOKENS) if device.type == "cuda" else (WIDTHS, MOST_TOKENS)
    pair = QUICK_PAIR if quick else FULL_PAIR
    end = time.perf_counter() + (QUICK_SECONDS if quick else FULL_SECONDS)
    wanted: list[tuple[RatedKind, int]] = [("block", widths[0]), ("head", widths[0]), *(("block", w) for w in widths[1:])]
    found, left = Found(), 0
    for kind, width in wanted:
        for dtype in DTYPES:
            if (kind, width) != wanted[0] and time.perf_counter() > end:
                left += 1
                continue
            tokens = affordable_tokens(LAYER_FLOPS * width**2, matmul[dtype].value / 2, pair, most)
            found += _small_stage(kind, width, dtype, tokens, device, pair)
    if not left:
        return found
    note = f"{left} of {2 * len(wanted)} layers and heads left out: they take too long here (fuyou bench --full)"
    return found + Found(notes=(note,))


def _small_stage(kind: RatedKind, width: int, dtype: Dtype, tokens: int, device: torch.device, pair: float) -> Found:
    anatomy, model = small_model(width, tokens)
    shape = shape_of(tokens)
    if kind == "block":
        alone: Alone = layer_alone(anatomy, model, device, dtype, shape)
        params = block_of(model).params
    else:
        alone = head_alone(anatomy, model, device, dtype, ACCUMULATE, shape, 0)
        params = head_owner(model).params
    sample = Sample(alone=alone, kind=kind, dtype=dtype, hidden=width, params=params, tokens=tokens)
    return timed([sample], device, seconds=pair)


def affordable_tokens(flops_per_token: float, rate: float, seconds: float, most: int = MOST_TOKENS) -> int:
    """Finds the largest power of two up to `most` whose forward, recompute and backward take `seconds` at most; at least 64."""
    tokens = LEAST_TOKENS
    while 2 * tokens <= most and 4 * flops_per_token * 2 * tokens <= seconds * rate:
        tokens *= 2
    return tokens


def shape_of(tokens: int) -> tuple[int, int]:
    """Splits tokens, a power of two, into rows of a length."""
    length = min(tokens, ROW_TOKENS)
    return tokens // length, length


def small_model(width: int, tokens: int) -> tuple[Anatomy, ModelSpec]:
    """Builds a Llama of one layer, without weights, at micro-batches of `shape_of(tokens)`."""
    from transformers import LlamaConfig

    from fuyou_cli.engine.anatomy import dissect
    from fuyou_cli.engine.inspect import inspect
    from fuyou_cli.engine.skeleton import build

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        num_hidden_layers=1,
        vocab_size=HEAD_ROWS,
    )
    anatomy = dissect(build(config, dtype="bfloat16", attention="sdpa"))
    rows, length = shape_of(tokens)
    model = inspect(anatomy, dtype="bfloat16", micro_batch_size=rows, max_seq_len=length, head_chunk_tokens=0)
    return anatomy, model


def layer_alone(
    anatomy: Anatomy,
    model: ModelSpec,
    device: torch.device,
    dtype: Dtype,
    shape: tuple[int, int],
    accumulate: Dtype = ACCUMULATE,
    micro_batches: int = 1,
) -> BlockAlone:
    from fuyou_cli.engine.alone import BlockAlone

    return BlockAlone(
        anatomy, block_of(model), dtype=dtype, accumulate=accumulate, shape=shape, device=device, micro_batches=micro_batches
    )


def head_alone(
    anatomy: Anatomy,
    model: ModelSpec,
    device: torch.device,
    dtype: Dtype,
    accumulate: Dtype,
    shape: tuple[int, int],
    chunk: int,
) -> HeadAlone:
    from fuyou_cli.engine.alone import HeadAlone

    return HeadAlone(
        anatomy, head_of(model), head_owner(model), dtype=dtype, accumulate=accumulate, shape=shape, chunk=chunk, device=device
    )


def block_of(model: ModelSpec) -> StageSpec:
    """Returns the first block: the others of a model are alike, or nearly."""
    return next(stage for stage in model.stages if stage.kind == "block")


def head_of(model: ModelSpec) -> StageSpec:
    """Returns the whole head, or the first piece of its vocabulary."""
    return next(stage for stage in model.stages if stage.kind == "head")


def head_owner(model: ModelSpec) -> StageSpec:
    """Returns the stage whose weights the head computes with."""
    return model.stages[model.owner(head_of(model).index)]


# ---- timing stages ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A stage to be timed. Its rates are kept as those of micro-batches of `tokens`."""

    alone: Alone
    kind: RatedKind
    dtype: Dtype
    hidden: int
    params: int
    tokens: int

    @property
    def parts(self) -> dict[str, _Part]:
        """Lists what is timed, by the field of a StageRate."""
        from fuyou_cli.engine.alone import BlockAlone

        alone = self.alone
        parts = {"forward": _Part("forward", alone.forward, alone.flops, 0.25)}
        parts["backward"] = _Part("backward", alone.backward, alone.backward_flops, 0.5)
        if isinstance(alone, BlockAlone) and alone.given_flops:  # of a head nothing is kept
            parts["given"] = _Part("backward, outputs kept", alone.given, alone.given_flops, 0.25)
        return parts

    def rated(self, taken: list[list[float]], *, one_of_several: bool) -> Found:
        """Computes rates from the seconds of each repeat of each part: those of all repeats together, not the median, as a step
        is made of thousands of them, and takes as long as all do."""
        note = f"{count(self.params)} parameters, {self.alone.tokens} tokens"
        what, mean, parts = f"{self.kind} {self.hidden} {self.dtype}", statistics.harmonic_mean, self.parts
        what += f" x {self.tokens}" if one_of_several else ""
        rates = [
            rate_of(f"{what}, {part.name}", "FLOP/s", each(part.flops, repeats), note, middle=mean)
            for part, repeats in zip(parts.values(), taken, strict=True)
        ]
        found = dict(zip(parts, (rate.value for rate in rates), strict=True))
        rate = StageRate(
            kind=self.kind, dtype=self.dtype, hidden=self.hidden, params=self.params, tokens=self.tokens, **found
        )  # fmt: skip
        return Found(stage_rates=(rate,), rates=tuple(rates))


def timed(samples: Sequence[Sample], device: torch.device, *, seconds: float) -> Found:
    """Measures stages that take turns. `seconds`: of everything, about."""
    trim(apart=True)  # as in a run, logits are mapped anew each time, and not taken from a hole that a model's making left
    parts = [list(sample.parts.values()) for sample in samples]
    taken = iter(_in_turns([part for one in parts for part in one], device, seconds))
    found = Found()
    for sample, own in zip(samples, parts, strict=True):
        found += sample.rated(list(islice(taken, len(own))), one_of_several=len(samples) > 1)
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    """Of what a stage is timed at."""

    name: str
    action: Callable[[], None]
    flops: float
    share: float  # of the time of its stage


def _in_turns(parts: list[_Part], device: torch.device, seconds: float) -> list[list[float]]:
    """Times each repeat of each part, after one that is not counted. They take turns all the time there is: a shared
    machine's rate comes and goes within seconds, and what is planned with their ratio has to see them at the same one. Two
    turns at least, unless one takes twice the time."""
    for part in parts:
        seconds_of(part.action, device)  # a GPU is done with it before anything is counted
    taken: list[list[float]] = [[] for _ in parts]
    whole = sum(part.share for part in parts)
    begin, turns = time.perf_counter(), 0
    while (passed := time.perf_counter() - begin) < seconds or (turns < 2 and passed < 2 * seconds):
        turns += 1
        for part, repeats in zip(parts, taken, strict=True):
            end = time.perf_counter() + seconds * part.share / whole / TURNS
            repeats.append(seconds_of(part.action, device))
            while time.perf_counter() < end:
                repeats.append(seconds_of(part.action, device))
    return taken
