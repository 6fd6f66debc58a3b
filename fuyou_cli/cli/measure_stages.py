"""Measures stages: small decoder layers and heads of a few widths, and a recipe's own, through the code that a run uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from fuyou_cli.core.units import count, gib
from fuyou_cli.spec.hardware import HardwareProfile, RatedKind, StageRate
from fuyou_cli.spec.model import ITEM_SIZE, Dtype, ModelSpec, StageSpec
from fuyou_cli.spec.plan import Numerics

from .measure import Rate, each, rate_of, times

if TYPE_CHECKING:
    import torch

    from fuyou_cli.engine.alone import BlockAlone
    from fuyou_cli.engine.anatomy import Anatomy

WIDTHS = (1024, 2048, 512)  # in this order: when time runs out, the last are left out
HEAD_WIDTH, HEAD_ROWS = 1024, 8192
LAYER_FLOPS = 2.0 * 11  # per token and square of the width, forward: close enough to choose the number of tokens by
ACCUMULATE: Dtype = "float32"
LEAST_TOKENS, MOST_TOKENS = 64, 512
QUICK_SECONDS, FULL_SECONDS = 2.5, 40.0  # of all layers of a few widths together
QUICK_PAIR, FULL_PAIR = 0.3, 2.0  # of one forward and one backward that tokens are chosen for
RECIPE_QUICK_PAIR, RECIPE_FULL_PAIR = 6.0, 40.0
USABLE = 0.8  # of the memory that is free


class Alone(Protocol):
    """A stage by itself: `engine.alone`."""

    flops: float
    tokens: int

    def forward(self) -> None: ...

    def backward(self) -> None: ...


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
    """Llama layers of WIDTHS and a small head in both dtypes: as many as there is time for, the first width in any case."""
    found, left = NOTHING, 0
    end = time.perf_counter() + (QUICK_SECONDS if quick else FULL_SECONDS)
    for width in WIDTHS:
        tokens = MOST_TOKENS
        for dtype in cast(tuple[Dtype, ...], ("bfloat16", "float32")):
            if width != WIDTHS[0] and time.perf_counter() > end:
                left += 1
                continue
            pair = QUICK_PAIR if quick else FULL_PAIR
            tokens = affordable_tokens(LAYER_FLOPS * width**2, matmul[dtype].value / 2, pair)
            anatomy, model = small_model(width, tokens)
            found += _of_one_width(anatomy, model, device, dtype, tokens, pair=pair, head=width == HEAD_WIDTH)
    notes = (f"{left} of {2 * len(WIDTHS)} layers left out: they take too long here (fuyou bench --full)",) * (left > 0)
    return Stages(stage_rates=found.stage_rates, rates=found.rates, notes=notes)


def _of_one_width(
    anatomy: Anatomy, model: ModelSpec, device: torch.device, dtype: Dtype, tokens: int, *, pair: float, head: bool
) -> Stages:
    shape = (1, tokens)
    block = timed(
        layer_alone(anatomy, model, device, dtype, shape), device, "block", dtype, model.hidden_size,
        block_of(model).params, tokens, seconds=pair,
    )  # fmt: skip
    if not head:
        return block
    return block + timed(
        _head_alone(anatomy, model, device, dtype, ACCUMULATE, shape, 0), device, "head", dtype, model.hidden_size,
        _head_owner(model).params, tokens, seconds=pair,
    )  # fmt: skip


def affordable_tokens(flops_per_token: float, rate: float, seconds: float, most: int = MOST_TOKENS) -> int:
    """The largest power of two up to `most` whose forward, recompute and backward take `seconds` at most; at least 64."""
    tokens = LEAST_TOKENS
    while 2 * tokens <= most and 4 * flops_per_token * 2 * tokens <= seconds * rate:
        tokens *= 2
    return tokens


def small_model(width: int, tokens: int) -> tuple[Anatomy, ModelSpec]:
    """A Llama of one layer, without weights, at micro-batches of (1, tokens)."""
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
    model = inspect(anatomy, dtype="bfloat16", micro_batch_size=1, max_seq_len=tokens, head_chunk_tokens=0)
    return anatomy, model


def layer_alone(
    anatomy: Anatomy,
    model: ModelSpec,
    device: torch.device,
    dtype: Dtype,
    shape: tuple[int, int],
    accumulate: Dtype = ACCUMULATE,
) -> BlockAlone:
    from fuyou_cli.engine.alone import BlockAlone

    return BlockAlone(anatomy, block_of(model), dtype=dtype, accumulate=accumulate, shape=shape, device=device)


def _head_alone(
    anatomy: Anatomy,
    model: ModelSpec,
    device: torch.device,
    dtype: Dtype,
    accumulate: Dtype,
    shape: tuple[int, int],
    chunk: int,
) -> Alone:
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


# ---- timing one stage ------------------------------------------------------------------------------------------------


def timed(
    alone: Alone, device: torch.device, kind: RatedKind, dtype: Dtype, hidden: int, params: int, tokens: int, *, seconds: float
) -> Stages:
    """The rates of one stage, kept as those of micro-batches of `tokens`. `seconds`: of a forward and a backward, about."""
    forward = each(alone.flops, times(alone.forward, device, 5, seconds=seconds / 4, least=2))
    backward = each(3 * alone.flops, times(alone.backward, device, 5, seconds=0.75 * seconds, least=2))
    what = f"{kind} {hidden} {dtype}"
    note = f"{count(params)} parameters, {alone.tokens} tokens"
    rates = (
        rate_of(f"{what}, forward", "FLOP/s", forward, note),
        rate_of(f"{what}, backward", "FLOP/s", backward, note),
    )
    rate = StageRate(
        kind=kind, dtype=dtype, hidden=hidden, params=params, tokens=tokens, forward=rates[0].value, backward=rates[1].value
    )
    return Stages(stage_rates=(rate,), rates=rates)


# ---- a recipe's own --------------------------------------------------------------------------------------------------


def measure_recipe(
    anatomy: Anatomy,
    numerics: Numerics,
    profile: HardwareProfile,
    device: torch.device,
    *,
    quick: bool,
    free: int,
    progress: Callable[[str], None] = lambda _: None,
) -> Stages:
    """One block and the head of the model, at the recipe's dtype and micro-batch. `profile` says what to expect, `free` the
    bytes of memory there are to compute in: where a stage takes too long or too much, fewer tokens are measured, and a
    note says so."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(numerics.torch_threads)
    pair = RECIPE_QUICK_PAIR if quick else RECIPE_FULL_PAIR
    size = _Size(profile=profile, numerics=numerics, seconds=pair, free=int(free * USABLE))
    try:
        progress("the recipe's decoder block")
        block = _recipe_block(anatomy, size, device)
        progress("the recipe's head")
        return block + _recipe_head(anatomy, size, device)
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Size:
    """What may be measured at once."""

    profile: HardwareProfile
    numerics: Numerics
    seconds: float
    free: int

    def fits(self, kind: RatedKind, params: int, hidden: int, tokens: int, *, flops: float, peak: float) -> bool:
        """Whether `tokens` tokens can be computed: `flops` forward, and `peak` bytes beside weights and gradients."""
        rate = self.profile.stage_rate(kind, self.numerics.compute_dtype, hidden, params, tokens)
        seconds = flops * (1 / rate.forward + 3 / rate.backward)
        return seconds <= self.seconds and self.weights(params) + peak <= self.free

    def weights(self, params: int) -> int:
        """Bytes of weights and of their gradients' sum."""
        return params * (ITEM_SIZE[self.numerics.compute_dtype] + ITEM_SIZE[self.numerics.accumulate_dtype])

    def too_large(self, what: str, params: int) -> Stages | None:
        if self.weights(params) <= self.free:
            return None
        note = (
            f"the recipe's {what} is not measured: {gib(self.weights(params))} of weights and gradients, {gib(self.free)} free"
        )
        return Stages(stage_rates=(), rates=(), notes=(note,))


def _inspected(anatomy: Anatomy, numerics: Numerics, shape: tuple[int, int]) -> ModelSpec:
    from fuyou_cli.engine.inspect import inspect

    return inspect(
        anatomy,
        dtype=numerics.compute_dtype,
        micro_batch_size=shape[0],
        max_seq_len=shape[1],
        head_chunk_tokens=numerics.head_chunk_tokens,
    )


def _recipe_block(anatomy: Anatomy, size: _Size, device: torch.device) -> Stages:
    numerics = size.numerics
    whole = (numerics.micro_batch_size, numerics.max_seq_len)
    model = _inspected(anatomy, numerics, whole)
    stage, hidden = block_of(model), model.hidden_size
    if refusal := size.too_large("block", stage.params):
        return refusal
    shape = whole
    while (tokens := shape[0] * shape[1]) > LEAST_TOKENS:
        share = tokens / (whole[0] * whole[1])
        flops, peak = stage.forward_flops * share, stage.backward_peak * share
        if size.fits("block", stage.params, hidden, tokens, flops=flops, peak=peak):
            break
        shape = (shape[0] // 2, shape[1]) if shape[0] > 1 else (1, shape[1] // 2)
    if shape != whole:
        model = _inspected(anatomy, numerics, shape)
    alone = layer_alone(anatomy, model, device, numerics.compute_dtype, shape, numerics.accumulate_dtype)
    found = timed(alone, device, "block", numerics.compute_dtype, hidden, stage.params, alone.tokens, seconds=size.seconds / 2)
    return found + _fewer("block", alone.tokens, whole[0] * whole[1])


def _recipe_head(anatomy: Anatomy, size: _Size, device: torch.device) -> Stages:
    numerics = size.numerics
    shape = (numerics.micro_batch_size, numerics.max_seq_len)
    model = _inspected(anatomy, numerics, shape)
    stage, params, hidden = _head(model), _head_owner(model).params, model.hidden_size
    if refusal := size.too_large("head", params):
        return refusal
    tokens = shape[0] * shape[1]
    first = min(numerics.head_chunk_tokens or tokens, tokens)  # what a run computes at once
    taken = first
    while taken > LEAST_TOKENS:
        flops, peak = stage.forward_flops * taken / tokens, stage.backward_peak * taken / first
        if size.fits("head", params, hidden, taken, flops=flops, peak=peak):
            break
        taken //= 2
    chunk = numerics.head_chunk_tokens if taken == first else taken
    alone = _head_alone(anatomy, model, device, numerics.compute_dtype, numerics.accumulate_dtype, shape, chunk)
    rated = tokens if taken == first else alone.tokens  # whole chunks are alike: the rate is that of the micro-batch
    found = timed(alone, device, "head", numerics.compute_dtype, hidden, params, rated, seconds=size.seconds / 2)
    return found + _fewer("head", alone.tokens, first)


def _fewer(what: str, taken: int, wanted: int) -> Stages:
    if taken == wanted:
        return NOTHING
    note = f"the recipe's {what} is measured on {taken} tokens: {wanted} at once would take too long or too much memory here"
    return Stages(stage_rates=(), rates=(), notes=(note,))
