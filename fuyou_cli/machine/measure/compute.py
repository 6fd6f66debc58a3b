"""Times decoder layers and heads through the code that a run uses: of a few widths, and a recipe's own, at its dtype and
micro-batch, as much of them as time and memory allow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from fuyou_cli.core.process import trim
from fuyou_cli.core.units import count, gib
from fuyou_cli.spec.hardware import RatedKind, StageRate
from fuyou_cli.spec.model import ITEM_SIZE, Dtype, ModelSpec, StageSpec
from fuyou_cli.spec.plan import Numerics

from .timing import DTYPES, Action, Findings, Rate, counted, in_turns, launch_seconds, left_out, rates_of, seconds_of

if TYPE_CHECKING:
    import torch

    from fuyou_cli.engine.alone import BlockAlone, HeadAlone
    from fuyou_cli.engine.anatomy import Anatomy

    Alone = BlockAlone | HeadAlone


# ---- stages ----------------------------------------------------------------------------------------------------------


WIDTHS = (1024, 2048, 512)  # in this order: when time runs out, the last are left out; a head is measured at the first
GPU_WIDTHS = (4096, 2048, 1024)  # narrower ones only show how long a launch takes
HEAD_ROWS = 8192
LAYER_FLOPS = 2.0 * 11  # per token and square of the width, forward: close enough to choose the number of tokens by
LEAST_TOKENS, MOST_TOKENS, MOST_GPU_TOKENS = 64, 512, 8192
ROW_TOKENS = 1024  # of a row at most: more tokens are more rows
QUICK_SECONDS, FULL_SECONDS = 2.5, 40.0  # of all layers of a few widths together
QUICK_PAIR, FULL_PAIR = 0.3, 2.0  # of one forward and one backward that tokens are chosen for


def measure_layers(device: torch.device, matmul: dict[Dtype, Rate], *, quick: bool) -> Findings:
    """Measures Llama layers of a few widths and a small head, in both dtypes, as there is time; the first width always."""
    widths, most = (GPU_WIDTHS, MOST_GPU_TOKENS) if device.type == "cuda" else (WIDTHS, MOST_TOKENS)
    pair = QUICK_PAIR if quick else FULL_PAIR
    end = time.perf_counter() + (QUICK_SECONDS if quick else FULL_SECONDS)
    wanted: list[tuple[RatedKind, int]] = [("block", widths[0]), ("head", widths[0]), *(("block", w) for w in widths[1:])]
    findings, left = Findings(), 0
    for kind, width in wanted:
        for dtype in DTYPES:
            if (kind, width) != wanted[0] and time.perf_counter() > end:
                left += 1
                continue
            tokens = affordable_tokens(LAYER_FLOPS * width**2, matmul[dtype].value / 2, pair, most)
            stage = small_stage(kind, width, dtype, tokens, device)
            findings += timed([TimedStage(stage=stage, alone=stage.make(tokens), tokens=tokens)], device, seconds=pair)
    if not left:
        return findings
    note = f"{left} of {2 * len(wanted)} layers and heads left out: they take too long here (fuyou bench --full)"
    return findings + Findings(notes=(note,))


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


def small_stage(kind: RatedKind, width: int, dtype: Dtype, tokens: int, device: torch.device) -> RunStage:
    """Describes the layer or the head of a Llama of one layer, at micro-batches of `shape_of(tokens)`."""
    from transformers import LlamaConfig

    from fuyou_cli.engine.anatomy import dissect
    from fuyou_cli.engine.skeleton import build

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        num_hidden_layers=1,
        vocab_size=HEAD_ROWS,
    )
    anatomy = dissect(build(config, dtype=dtype, attention="sdpa"))
    rows, length = shape_of(tokens)
    numerics = Numerics(
        compute_dtype=dtype, accumulate_dtype="float32", batch_size=rows, micro_batch_size=rows, max_seq_len=length,
        head_chunk_tokens=0, torch_threads=1, seed=0,
    )  # fmt: skip
    return (block_stage if kind == "block" else head_stage)(anatomy, numerics, device)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStage:
    """Describes a model's first block or head as a run computes it. `make` makes it for at most `tokens` tokens, with the
    weights and sums of the same stage made before, if it is given one."""

    kind: RatedKind
    numerics: Numerics
    hidden: int
    params: int
    trained: int
    tokens: int
    weights: int  # bytes of weights, of their gradients' sum and of one gradient, for any tokens
    peak: int  # bytes that `tokens` take beside those
    make: Callable[..., Alone]
    compiles: bool = False  # whole, not with fewer tokens


def block_stage(
    anatomy: Anatomy, numerics: Numerics, device: torch.device, *, compiled: bool = False, room: int | None = None
) -> RunStage:
    """Describes the first block: the others of a model are alike, or nearly. `compiled`: compiles it, once for all tokens of a
    micro-batch, as each number of tokens takes seconds; fewer are computed without. `room`: bytes for copies of a
    small one."""
    from fuyou_cli.engine.alone import MOST_ROOM, BlockAlone
    from fuyou_cli.engine.compiled import CompiledBlocks, as_compiled

    whole = numerics.micro_batch_size * numerics.max_seq_len
    inspected = _inspected(anatomy, numerics, (numerics.micro_batch_size, numerics.max_seq_len))
    block = next(stage for stage in inspected.stages if stage.kind == "block")

    def make(tokens: int, like: Alone | None = None) -> Alone:
        assert like is None or isinstance(like, BlockAlone)
        length = min(tokens, numerics.max_seq_len)
        shape = (tokens // length, length)
        blocks, model = (CompiledBlocks() if compiled and tokens == whole else None), _inspected(anatomy, numerics, shape)
        spec = (model if blocks is None else as_compiled(model)).stages[block.index]
        return BlockAlone(
            anatomy, spec, dtype=numerics.compute_dtype, accumulate=numerics.accumulate_dtype, shape=shape, device=device,
            micro_batches=-(-numerics.batch_size // numerics.micro_batch_size), room=MOST_ROOM if room is None else room,
            document_step=numerics.document_step, compiled=blocks, like=like,
        )  # fmt: skip

    kept = sum(operator.bytes for operator in block.operators)  # held while they are given back
    weights, gradient = _weights(block, numerics)
    return RunStage(
        kind="block", numerics=numerics, hidden=inspected.hidden_size, params=block.params, trained=block.trained,
        weights=weights + gradient, peak=max(0, block.backward_peak - gradient) + kept, tokens=whole, make=make,
        compiles=compiled,
    )  # fmt: skip


def head_stage(anatomy: Anatomy, numerics: Numerics, device: torch.device) -> RunStage:
    """Describes the whole head, or the first piece of its vocabulary."""
    from fuyou_cli.engine.alone import HeadAlone

    shape = (numerics.micro_batch_size, numerics.max_seq_len)
    inspected = _inspected(anatomy, numerics, shape)
    head = next(stage for stage in inspected.stages if stage.kind == "head")
    owner, whole = inspected.stages[inspected.owner(head.index)], shape[0] * shape[1]
    at_once = min(numerics.head_chunk_tokens or whole, whole)

    def make(tokens: int, like: Alone | None = None) -> Alone:
        assert like is None or isinstance(like, HeadAlone)
        chunk = numerics.head_chunk_tokens if tokens == at_once else tokens
        return HeadAlone(
            anatomy, head, owner, dtype=numerics.compute_dtype, accumulate=numerics.accumulate_dtype, shape=shape, chunk=chunk,
            device=device, like=like,
        )  # fmt: skip

    weights, gradient = _weights(owner, numerics)
    return RunStage(
        kind="head", numerics=numerics, hidden=inspected.hidden_size, params=owner.params, trained=owner.trained,
        weights=weights + gradient, peak=max(0, head.backward_peak - gradient), tokens=at_once, make=make,
    )  # fmt: skip


def _weights(stage: StageSpec, numerics: Numerics) -> tuple[int, int]:
    """Counts the bytes of a stage's weights and of their gradients' sum, and those of its largest gradient."""
    item = ITEM_SIZE[numerics.compute_dtype]
    largest = max((tensor.numel for tensor in stage.tensors if not tensor.frozen), default=0)
    return stage.params * item + stage.trained * ITEM_SIZE[numerics.accumulate_dtype], largest * item


def _inspected(anatomy: Anatomy, numerics: Numerics, shape: tuple[int, int]) -> ModelSpec:
    from fuyou_cli.engine.describe import inspect

    return inspect(
        anatomy, dtype=numerics.compute_dtype, micro_batch_size=shape[0], max_seq_len=shape[1],
        head_chunk_tokens=numerics.head_chunk_tokens,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedStage:
    """A stage to be timed. Its rates are kept as those of micro-batches of `tokens`. `layers`: what it is timed for, if
    it is a recipe's own (`StageRate`)."""

    stage: RunStage
    alone: Alone
    tokens: int
    layers: str = ""

    @property
    def kind(self) -> RatedKind:
        return "compiled block" if getattr(self.alone, "compiled", None) is not None else self.stage.kind

    @property
    def _shape(self) -> str:
        """Names the tokens that are computed at once, of a block in rows."""
        width = min(self.alone.tokens, self.stage.numerics.max_seq_len)
        return f"{self.alone.tokens // width} x {width}" if self.stage.kind == "block" else str(self.alone.tokens)

    def actions(self, *, one_of_several: bool) -> dict[str, Action]:
        """Lists what is timed, by the field of a StageRate."""
        from fuyou_cli.engine.alone import BlockAlone

        alone, stage = self.alone, self.stage
        what = f"{self.kind} {stage.hidden} {stage.numerics.compute_dtype}" + (f" x {self._shape}" if one_of_several else "")
        actions = {
            "forward": Action(name=f"{what}, forward", run=alone.forward, amount=alone.flops, share=0.25),
            "backward": Action(name=f"{what}, backward", run=alone.backward, amount=alone.backward_flops, share=0.5),
        }
        if isinstance(alone, BlockAlone) and alone.given_flops:  # of a head nothing is kept
            name = f"{what}, backward, outputs kept"
            actions["given"] = Action(name=name, run=alone.backward_from_kept, amount=alone.given_flops, share=0.25)
        return actions

    def rated(self, rates: dict[str, Rate], device: torch.device) -> StageRate:
        """Returns what was found, by the field of a StageRate, with the shape it was found at. Times launches on the device."""
        from fuyou_cli.engine.alone import BlockAlone

        alone, stage, by_field = self.alone, self.stage, {field: rate.value for field, rate in rates.items()}
        rate = StageRate(
            kind=self.kind, dtype=stage.numerics.compute_dtype, hidden=stage.hidden, params=stage.params, tokens=self.tokens,
            forward=by_field["forward"], backward=by_field["backward"], given=by_field.get("given", 0.0),
            graph=alone.graph_bytes() if isinstance(alone, BlockAlone) else 0,
            expert_rows=alone.expert_rows if isinstance(alone, BlockAlone) else 0.0,
            forward_launch=launch_seconds(alone.forward, device), backward_launch=launch_seconds(alone.backward, device),
        )  # fmt: skip
        if not self.layers:
            return rate
        is_block = isinstance(alone, BlockAlone)
        return replace(
            rate, threads=stage.numerics.torch_threads, trained=stage.trained, layers=self.layers, forward_flops=alone.flops,
            backward_flops=alone.backward_flops, given_flops=alone.given_flops if isinstance(alone, BlockAlone) else 0.0,
            tokens=self.tokens if device.type == "cuda" else alone.tokens,  # of a head on a processor: of the piece
            width=min(alone.tokens, stage.numerics.max_seq_len) if is_block else 1,
        )  # fmt: skip


def timed(samples: Sequence[TimedStage], device: torch.device, *, seconds: float) -> Findings:
    """Measures stages that take turns. `seconds`: of everything, about."""
    trim(apart=True)  # as in a run, logits are mapped anew each time, and not taken from a hole that a model's making left
    by_sample = [sample.actions(one_of_several=len(samples) > 1) for sample in samples]
    turns = in_turns([action for actions in by_sample for action in actions.values()], device, seconds)
    findings, place = Findings(), 0
    for sample, actions in zip(samples, by_sample, strict=True):
        own = [replace(turn, seconds=turn.seconds[place : place + len(actions)]) for turn in counted(turns)]
        note = f"{count(sample.stage.params)} parameters, {sample.alone.tokens} tokens{left_out(turns)}"
        rates = rates_of(list(actions.values()), own, "FLOP/s", note)
        findings += Findings(stage_rates=(sample.rated(dict(zip(actions, rates, strict=True)), device),), rates=tuple(rates))
        place += len(actions)
    return findings


# ---- a recipe's own stages -------------------------------------------------------------------------------------------


QUICK_RECIPE_PAIR, FULL_RECIPE_PAIR = 4.0, 40.0  # seconds of one forward and one backward of all shapes together that are timed
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
    seconds, free, spare = QUICK_RECIPE_PAIR if quick else FULL_RECIPE_PAIR, int(free * USABLE), int(free * (1 - USABLE))
    findings = Findings()
    try:
        block = partial(block_stage, compiled=compiled, room=spare)
        for name, stage, of in (("decoder block", block, sizes[:1] if compiled else sizes), ("head", head_stage, sizes)):
            progress(f"the recipe's {name}")
            trim()  # what the measurements before this have freed is part of `free`
            stages = _unlike([stage(anatomy, numerics, device) for numerics in of])
            findings += _measured(stages, device, seconds=seconds, free=free, layers=layers)
    finally:
        torch.set_num_threads(threads)
    return findings


def _unlike(stages: Sequence[RunStage]) -> list[RunStage]:
    """Leaves out heads that compute the same piece as one before."""
    by_shape = dict[tuple[int, int], RunStage]()
    for stage in stages:
        by_shape.setdefault((stage.tokens, stage.numerics.max_seq_len * (stage.kind == "block")), stage)
    return list(by_shape.values())


def _measured(stages: Sequence[RunStage], device: torch.device, *, seconds: float, free: int, layers: str) -> Findings:
    """Measures a stage at every size, as long as all of them fit in memory and in the `seconds` of a turn together."""
    first = stages[0]
    if free <= first.weights:
        needs = f"{gib(first.weights)} of weights and gradients, {gib(free)} are free"
        return Findings(notes=(f"the recipe's {first.kind} is not measured: it needs {needs}",))
    free -= first.weights
    alone, pair_seconds = _grown(first, device, seconds=seconds, left=free)
    notes: tuple[str, ...] = ()
    tokens = first.numerics.micro_batch_size * first.numerics.max_seq_len  # of a micro-batch, whose chunks are alike
    if alone.tokens < first.tokens:
        tokens = alone.tokens
        why = f"{first.tokens} would take too long or too much memory here" + (
            ", so it is not compiled" if first.compiles else ""
        )
        notes = (f"the recipe's {first.kind} is measured on {tokens} tokens: {why}",)
    samples, pace = [TimedStage(stage=first, alone=alone, tokens=tokens, layers=layers)], pair_seconds / alone.tokens
    seconds, free = seconds - pair_seconds, free - first.peak
    for stage in stages[1:] if not notes else ():
        if stage.tokens * pace > seconds or stage.peak > free:
            continue
        whole = stage.numerics.micro_batch_size * stage.numerics.max_seq_len
        samples.append(TimedStage(stage=stage, alone=stage.make(stage.tokens, alone), tokens=whole, layers=layers))
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
        pair_seconds = seconds_of(alone.forward, device) + seconds_of(alone.backward, device)
        more = min(stage.tokens, 8 * tokens)
        while more > tokens and (pair_seconds * more / tokens > seconds or stage.peak * more / stage.tokens > left):
            more //= 2
        if more <= tokens:
            return alone, pair_seconds
        tokens = more
        del alone  # its weights, before those of the next
