"""Measures stages: small decoder layers and heads of a few widths, and a recipe's own, through the code that a run uses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from fuyou_cli.core.units import count, gib
from fuyou_cli.spec.hardware import RatedKind, StageRate
from fuyou_cli.spec.model import ITEM_SIZE, Dtype, ModelSpec, StageSpec
from fuyou_cli.spec.plan import Numerics

from ..allocator import trim
from .profile_rates import DTYPES, Rate, each, rate_of, seconds_of

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
RECIPE_QUICK_PAIR, RECIPE_FULL_PAIR = 8.0, 40.0
RECIPE_SECONDS: dict[RatedKind, float] = {"block": 24.0, "head": 12.0}  # of all repeats, at least,
SEVERAL = 1.25  # times as long where micro-batches of several sizes take turns
_MEASURED: dict[RatedKind, str] = {"block": "decoder block", "head": "head"}  # of a recipe, in words
TURNS = 8  # of forward, backward, ... each, about
USABLE = 0.8  # of the memory that is free


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """What was found of some stages."""

    stage_rates: tuple[StageRate, ...]
    rates: tuple[Rate, ...]
    notes: tuple[str, ...] = ()

    def __add__(self, other: Stages) -> Stages:
        return Stages(
            stage_rates=self.stage_rates + other.stage_rates,
            rates=self.rates + other.rates,
            notes=self.notes + other.notes,
        )


NOTHING = Stages(stage_rates=(), rates=())


# ---- layers of a few widths ------------------------------------------------------------------------------------------


def measure_layers(device: torch.device, matmul: dict[Dtype, Rate], *, quick: bool) -> Stages:
    """Llama layers of a few widths and a small head, in both dtypes: as many as there is time for, the layers of the first
    width in any case."""
    widths, most = (GPU_WIDTHS, MOST_GPU_TOKENS) if device.type == "cuda" else (WIDTHS, MOST_TOKENS)
    pair = QUICK_PAIR if quick else FULL_PAIR
    end = time.perf_counter() + (QUICK_SECONDS if quick else FULL_SECONDS)
    wanted: list[tuple[RatedKind, int]] = [("block", widths[0]), ("head", widths[0]), *(("block", w) for w in widths[1:])]
    found, left = NOTHING, 0
    for kind, width in wanted:
        for dtype in DTYPES:
            if (kind, width) != wanted[0] and time.perf_counter() > end:
                left += 1
                continue
            tokens = affordable_tokens(LAYER_FLOPS * width**2, matmul[dtype].value / 2, pair, most)
            found += _small_stage(kind, width, dtype, tokens, device, pair)
    notes = (f"{left} of {2 * len(wanted)} layers and heads left out: they take too long here (fuyou bench --full)",)
    return found + Stages(stage_rates=(), rates=(), notes=notes * (left > 0))


def _small_stage(kind: RatedKind, width: int, dtype: Dtype, tokens: int, device: torch.device, pair: float) -> Stages:
    anatomy, model = small_model(width, tokens)
    shape = shape_of(tokens)
    if kind == "block":
        alone: Alone = layer_alone(anatomy, model, device, dtype, shape)
        params = block_of(model).params
    else:
        alone = _head_alone(anatomy, model, device, dtype, ACCUMULATE, shape, 0)
        params = _head_owner(model).params
    sample = Sample(alone=alone, kind=kind, dtype=dtype, hidden=width, params=params, tokens=tokens)
    return timed([sample], device, seconds=pair)


def affordable_tokens(flops_per_token: float, rate: float, seconds: float, most: int = MOST_TOKENS) -> int:
    """The largest power of two up to `most` whose forward, recompute and backward take `seconds` at most; at least 64."""
    tokens = LEAST_TOKENS
    while 2 * tokens <= most and 4 * flops_per_token * 2 * tokens <= seconds * rate:
        tokens *= 2
    return tokens


def shape_of(tokens: int) -> tuple[int, int]:
    """Rows and their length: of a power of two."""
    length = min(tokens, ROW_TOKENS)
    return tokens // length, length


def small_model(width: int, tokens: int) -> tuple[Anatomy, ModelSpec]:
    """A Llama of one layer, without weights, at micro-batches of `shape_of(tokens)`."""
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


def _head_alone(
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
        anatomy, _head(model), _head_owner(model), dtype=dtype, accumulate=accumulate, shape=shape, chunk=chunk, device=device
    )


def block_of(model: ModelSpec) -> StageSpec:
    """The first block: the others of a model are alike, or nearly."""
    return next(stage for stage in model.stages if stage.kind == "block")


def _head(model: ModelSpec) -> StageSpec:
    """The whole head, or the first piece of its vocabulary."""
    return next(stage for stage in model.stages if stage.kind == "head")


def _head_owner(model: ModelSpec) -> StageSpec:
    return model.stages[model.owner(_head(model).index)]


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
        """By the field of a StageRate."""
        from fuyou_cli.engine.alone import BlockAlone

        alone = self.alone
        parts = {"forward": _Part("forward", alone.forward, alone.flops, 0.25)}
        parts["backward"] = _Part("backward", alone.backward, alone.backward_flops, 0.5)
        if isinstance(alone, BlockAlone) and alone.given_flops:  # of a head nothing is kept
            parts["given"] = _Part("backward, outputs kept", alone.given, alone.given_flops, 0.25)
        return parts

    def rated(self, taken: list[list[float]], *, one_of_several: bool) -> Stages:
        """By the seconds of each repeat of each part. Of all repeats together, not the median: a step is made of thousands of
        them, and takes as long as all do."""
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
        return Stages(stage_rates=(rate,), rates=tuple(rates))


def timed(samples: Sequence[Sample], device: torch.device, *, seconds: float) -> Stages:
    """The rates of stages that take turns. `seconds`: of everything, about."""
    trim(apart=True)  # as in a run, logits are mapped anew each time, and not taken from a hole that a model's making left
    parts = [list(sample.parts.values()) for sample in samples]
    taken = iter(_in_turns([part for one in parts for part in one], device, seconds))
    found = NOTHING
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
    """Seconds of each repeat of each part, after one that is not counted. They take turns all the time there is: a shared
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


# ---- a recipe's own --------------------------------------------------------------------------------------------------


def measure_recipe(
    anatomy: Anatomy,
    sizes: Sequence[Numerics],
    device: torch.device,
    *,
    quick: bool,
    free: int,
    progress: Callable[[str], None] = lambda _: None,
) -> Stages:
    """One block and the head of the model, at the recipe's dtype and micro-batch; where that is to be chosen, at several
    `sizes`, the usual one first. `free`: bytes of memory there are to compute in. Where a stage takes too long or too much,
    fewer tokens are measured, of the usual size alone, and a note says so."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(sizes[0].torch_threads)
    seconds = RECIPE_QUICK_PAIR if quick else RECIPE_FULL_PAIR
    found = NOTHING
    try:
        for kind, words in _MEASURED.items():
            progress(f"the recipe's {words}")
            found += _measured(kind, anatomy, sizes, device, seconds=seconds, free=int(free * USABLE))
    finally:
        torch.set_num_threads(threads)
    return found


def _measured(
    kind: RatedKind, anatomy: Anatomy, sizes: Sequence[Numerics], device: torch.device, *, seconds: float, free: int
) -> Stages:
    """A stage at every size, as long as all of them fit in memory together: they take turns."""
    samples: list[Sample] = []
    notes: tuple[str, ...] = ()
    for numerics in sizes:
        own = _Own(anatomy=anatomy, numerics=numerics, device=device, seconds=seconds, free=free)
        found = own.block() if kind == "block" else own.head()
        if found.note and samples:  # a size beside the usual one: whole, or not at all
            continue
        if found.sample is not None:
            samples.append(found.sample)
            free -= found.size
        if found.note:
            notes = (found.note,)
            break
    if not samples:
        return Stages(stage_rates=(), rates=(), notes=notes)
    seconds = max(seconds, RECIPE_SECONDS[kind]) * (SEVERAL if len(samples) > 1 else 1.0)
    return timed(samples, device, seconds=seconds) + Stages(stage_rates=(), rates=(), notes=notes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """A stage that can be timed, `size` bytes large; `note` where that is of less than it was asked for, or not at all."""

    sample: Sample | None
    size: int = 0
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Own:
    """The stages of a recipe's model, and what may be spent on each: about `seconds` for a forward and a backward."""

    anatomy: Anatomy
    numerics: Numerics
    device: torch.device
    seconds: float
    free: int

    def block(self) -> _Found:
        numerics = self.numerics
        whole = numerics.micro_batch_size * numerics.max_seq_len
        inspected = self._inspected((numerics.micro_batch_size, numerics.max_seq_len))
        stage = block_of(inspected)

        def made(tokens: int) -> Alone:
            length = min(tokens, numerics.max_seq_len)
            shape = (tokens // length, length)
            return layer_alone(
                self.anatomy, self._inspected(shape), self.device, numerics.compute_dtype, shape, numerics.accumulate_dtype,
                micro_batches=-(-numerics.batch_size // numerics.micro_batch_size),
            )  # fmt: skip

        kept = sum(operator.bytes for operator in stage.operators)  # held while they are given back
        peak = stage.backward_peak + kept
        alone = self._grown(made, stage.params, whole, peak)
        return self._found("block", alone, inspected.hidden_size, stage.params, whole, whole, peak=peak)

    def head(self) -> _Found:
        numerics = self.numerics
        shape = (numerics.micro_batch_size, numerics.max_seq_len)
        whole = shape[0] * shape[1]
        inspected = self._inspected(shape)
        params = _head_owner(inspected).params
        first = min(numerics.head_chunk_tokens or whole, whole)  # tokens a run computes at once

        def made(tokens: int) -> Alone:
            chunk = numerics.head_chunk_tokens if tokens == first else tokens
            dtypes = (numerics.compute_dtype, numerics.accumulate_dtype)
            return _head_alone(self.anatomy, inspected, self.device, *dtypes, shape, chunk)

        peak = _head(inspected).backward_peak
        alone = self._grown(made, params, first, peak)
        return self._found("head", alone, inspected.hidden_size, params, first, whole, peak=peak)

    def _grown(self, made: Callable[[int], Alone], params: int, whole: int, peak: int) -> Alone | None:
        """The stage at `whole` tokens, or at as many as time and memory allow (`peak`: bytes that `whole` take beside weights
        and gradients). None where not even its weights fit."""
        left = self.free - self._weights(params)
        if left <= 0:
            return None
        tokens = min(whole, LEAST_TOKENS)
        while True:
            alone = made(tokens)
            alone.forward()
            alone.backward()
            taken = seconds_of(alone.forward, self.device) + seconds_of(alone.backward, self.device)
            more = min(whole, 8 * tokens)
            while more > tokens and (taken * more / tokens > self.seconds or peak * more / whole > left):
                more //= 2
            if more <= tokens:
                return alone
            tokens = more
            del alone  # its weights, before those of the next

    def _found(
        self, kind: RatedKind, alone: Alone | None, hidden: int, params: int, first: int, whole: int, *, peak: int
    ) -> _Found:
        """The rates of a whole chunk (`first` tokens) are those of the micro-batch of `whole`, its chunks being alike."""
        if alone is None:
            needs = f"{gib(self._weights(params))} of weights and gradients, {gib(self.free)} are free"
            return _Found(sample=None, note=f"the recipe's {kind} is not measured: it needs {needs}")
        sample = Sample(
            alone=alone, kind=kind, dtype=self.numerics.compute_dtype, hidden=hidden, params=params,
            tokens=whole if alone.tokens == first else alone.tokens,
        )  # fmt: skip
        size = self._weights(params) + peak
        if alone.tokens == first:
            return _Found(sample=sample, size=size)
        why = f"{first} would take too long or too much memory here"
        return _Found(sample=sample, size=size, note=f"the recipe's {kind} is measured on {alone.tokens} tokens: {why}")

    def _weights(self, params: int) -> int:
        """Bytes of weights and of their gradients' sum."""
        return params * (ITEM_SIZE[self.numerics.compute_dtype] + ITEM_SIZE[self.numerics.accumulate_dtype])

    def _inspected(self, shape: tuple[int, int]) -> ModelSpec:
        from fuyou_cli.engine.inspect import inspect

        return inspect(
            self.anatomy,
            dtype=self.numerics.compute_dtype,
            micro_batch_size=shape[0],
            max_seq_len=shape[1],
            head_chunk_tokens=self.numerics.head_chunk_tokens,
        )
