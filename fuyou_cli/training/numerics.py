"""Resolves the settings that a run's result depends on, and chooses the micro-batch size. `auto` is resolved once.

Also checks limits of the model and the device: positions, token ids that have an embedding, memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from ..core.errors import UsageError
from ..core.units import GiB, MiB, align_up
from ..spec.hardware import HardwareProfile
from ..spec.model import Dtype, ModelFacts, ModelSpec
from ..spec.plan import Numerics
from .state.manifest import Manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..data.rows import DataSummary
    from ..recipe.schema import Recipe, TrainSection
    from .length import Epoch

THREADS_BESIDE_A_GPU = 4
HEAD_PIECE_BYTES = 256 * MiB  # limit of `auto` for one piece of logits and their gradients
MOST_HEAD_PIECE_BYTES = GiB  # on a GPU, which adds the head's whole gradient to its sum after every piece
_GPU_SHARE = 16  # the part of a GPU's memory that a piece may take is one in so many
_LOGIT_BYTES = 16  # per token and vocabulary entry: logits, float32 copy, softmax, gradient
USUAL_TOKENS = 1024  # fills two cores, and its activations stay below the mmap threshold
MOST_TOKENS = 8192  # more makes no machine faster; usual on a GPU, which adds a stage's whole gradients once per micro-batch
FEW_WIDTHS, MANY_WIDTHS = 8, 32
DOCUMENT_STEP = 64  # tokens; attention's own blocks are of 64
MOSTLY = 0.9  # of `max_seq_len`: rows that are as long in the mean are whole enough
MOST_OF_MIXTURES = 4 * MOST_TOKENS  # on a GPU: each of many experts gets few of them
GAIN = 0.02  # of a usual plan's step, which a search would change
SEARCHED_GAIN = 0.01
MOST_THREADS = 1024  # torch crashes if the system runs out of threads; a recipe's limit is the same
_NEAR = 1.25  # times the fastest usual plan; a search does not make a slower size the fastest

Seconds = Callable[[int], float | None]  # of a step with micro-batches of this many rows; None if it does not fit


def head_chunk(train: TrainSection, tokens: int, columns: int, *, piece: int = HEAD_PIECE_BYTES) -> int:
    """Returns the tokens that the head takes at once, with logits of `columns` columns. 0 means a micro-batch of `tokens`.
    `piece`: limit of `auto`, in bytes."""
    if train.head_chunk_tokens != "auto":
        return train.head_chunk_tokens
    most = max(64, piece // (_LOGIT_BYTES * columns))
    return 0 if tokens <= most else 1 << (most.bit_length() - 1)


def head_piece(recipe: Recipe, hardware: HardwareProfile) -> int:
    """Returns the limit of `auto` for one piece of logits. It does not depend on what other programs leave of a card. A resumed
    run keeps its own."""
    if hardware.device != "cuda":
        return HEAD_PIECE_BYTES
    memory = recipe.offload.max_memory.gpu.resolve(total=hardware.device_memory, auto=hardware.device_memory)
    return max(HEAD_PIECE_BYTES, min(MOST_HEAD_PIECE_BYTES, memory // _GPU_SHARE))


def divided(numerics: Numerics, *, apart: bool, on_cpu: bool, packing: str | Literal[False] = False) -> Numerics:
    """Says how rows are divided into micro-batches. `apart`: the model keeps documents apart, so rows that are not packed lie
    end to end.

    On a CPU oneDNN keeps code for each shape of a product in bfloat16, half a MiB and more: then there are few widths.
    """
    few = on_cpu and numerics.compute_dtype == "bfloat16"
    numerics = replace(numerics, padding="none" if apart and not packing else "micro_batch")
    has_documents = numerics.padding == "none" or packing == "isolated"
    return replace(
        numerics,
        width_step=align_up(-(-numerics.widest // (FEW_WIDTHS if few else MANY_WIDTHS)), 8),
        document_step=DOCUMENT_STEP if few and has_documents else 0,
    )


def usual_numerics(recipe: Recipe, *, apart: bool) -> Numerics:
    """Returns the numerics that a run has where nothing speaks for others. `apart`: the model keeps documents apart."""
    train, length, on_cpu = recipe.train, recipe.dataset.max_seq_len, recipe.offload.device != "cuda"
    usual = USUAL_TOKENS if on_cpu else MOST_TOKENS
    micro = (
        sizes_of(train.batch_size // train.lanes, length, usual=usual)[1]
        if train.micro_batch_size == "auto"
        else train.micro_batch_size
    )
    compute: Dtype = recipe.precision.compute
    numerics = Numerics(
        compute_dtype=compute, accumulate_dtype=compute, batch_size=train.batch_size, micro_batch_size=micro,
        max_seq_len=length, head_chunk_tokens=0, torch_threads=1, seed=recipe.seed,
    )  # fmt: skip
    return divided(numerics, apart=apart, on_cpu=on_cpu, packing=recipe.dataset.packing)


def widths_of(recipe: Recipe, numerics: Numerics) -> int:
    """Returns how many widths the micro-batches of a run can have."""
    evaluates = bool(recipe.dataset.eval or recipe.dataset.eval_fraction or recipe.eval.samples)
    packed = recipe.dataset.packing == "concat" and not evaluates
    return 1 if packed or numerics.padding == "step" else -(-numerics.widest // numerics.width_step)


def numerics_of(
    recipe: Recipe, facts: ModelFacts, hardware: HardwareProfile, manifest: Manifest | None, *, micro: int | None = None,
    epoch: Epoch | None = None, range_experts: int = 0,
) -> Numerics:  # fmt: skip
    """Resolves `auto` by fixed rules. A resumed run keeps its numerics, whatever the recipe says (`resume` refuses others).
    `micro`: the micro-batch size that replaces `auto`, in rows; `epoch`: what is known of the rows; `range_experts`: in a
    stage, of blocks that do not fit whole."""
    if manifest is not None:
        return manifest.numerics
    train, length = recipe.train, recipe.dataset.max_seq_len
    if train.micro_batch_size != "auto":
        micro = train.micro_batch_size
    elif micro is None:
        micro = sizes_of(train.batch_size // train.lanes, length, usual=usual_tokens(hardware))[1]
    chunk = head_chunk(train, micro * length, facts.vocabulary_rows or facts.logits, piece=head_piece(recipe, hardware))
    # Beside a GPU, torch only copies rows. A few threads reach the memory's bandwidth, and the update needs the cores.
    usual_threads = THREADS_BESIDE_A_GPU if hardware.device == "cuda" else MOST_THREADS
    numerics = Numerics(
        compute_dtype=recipe.precision.compute,
        accumulate_dtype=sums_in(recipe, micro, chunk),
        batch_size=train.batch_size,
        micro_batch_size=micro,
        max_seq_len=length,
        head_chunk_tokens=chunk,
        torch_threads=min(hardware.cores, usual_threads) if train.threads == "auto" else train.threads,
        seed=recipe.seed,
        vocabulary_rows=facts.vocabulary_rows,
        range_experts=range_experts,
        router_aux_loss=train.router_aux_loss or 0.0,
        lanes=train.lanes,
    )
    # Laid end to end, rows have attention document by document, and its output cannot be kept for backward: worth while for
    # rows that are unlike.
    unlike = epoch is not None and fmean(epoch.lengths) < MOSTLY * length
    apart = facts.keeps_apart and not train.compile and unlike
    return divided(numerics, apart=apart, on_cpu=hardware.device != "cuda", packing=recipe.dataset.packing)


def sums_in(recipe: Recipe, micro: int, chunk: int) -> Dtype:
    """Returns the dtype of sums of gradients, with micro-batches of `micro` rows whose head takes `chunk` tokens at once."""
    compute: Dtype = recipe.precision.compute
    # With one piece nothing is summed, so a wider dtype would hold the same numbers. The exception is a tied head and its
    # embedding, whose two gradients plain PyTorch also adds in the compute dtype.
    one_piece = recipe.train.batch_size == micro and chunk == 0
    return compute if compute == "float32" or one_piece else recipe.precision.grad_accum


def usual_tokens(hardware: HardwareProfile) -> int:
    """Returns the tokens of the usual micro-batch on this machine."""
    return MOST_TOKENS if hardware.device == "cuda" else USUAL_TOKENS


def sizes_of(batch_size: int, length: int, *, usual: int, most: int = MOST_TOKENS) -> tuple[list[int], int, list[int]]:
    """Returns the sizes that divide a batch: those below the usual one (descending), the usual one, and those above up to
    `most` tokens (ascending). `usual`: tokens."""
    small = [size for size in range(1, math.isqrt(batch_size) + 1) if batch_size % size == 0]
    divisors = sorted({*small, *(batch_size // size for size in small)})
    middle = max(size for size in divisors if size <= max(1, usual // length))
    smaller = [size for size in reversed(divisors) if size < middle]
    return smaller, middle, [size for size in divisors if middle < size <= most // length]


def likely_sizes(batch_size: int, length: int, *, usual: int) -> list[int]:
    """Returns the sizes that a plan is most likely to choose: the usual one and its two neighbours."""
    smaller, middle, larger = sizes_of(batch_size, length, usual=usual)
    return [middle, *smaller[:1], *larger[:1]]


def timed_shapes(rows: int, length: int, *, usual: int) -> list[tuple[int, int]]:
    """Returns the shapes of micro-batches (rows, tokens of a row) that tell what any other takes, up to `rows` rows of
    `length`: few tokens and many, in rows of three lengths, as fewer do not tell a row's own cost from that of attention. Those
    first that count most where there is no time or memory for all: of the usual one alone, time is in proportion to tokens."""
    short, half = max(1, length // 4), max(1, length // 2)
    few, many = (max(1, min(rows, tokens // length)) for tokens in (usual, 2 * usual))
    shapes = [(few, length), (1, short), (few * length // short, short), (few * length // half, half), (many, length)]
    return list(dict.fromkeys(shapes))


def fastest_size(
    batch_size: int, length: int, *, usual: int, planned: Seconds, searched: Seconds, needed: Callable[[int], int],
    most: int = MOST_TOKENS,
) -> int:  # fmt: skip
    """Returns the size with the fastest step. The size of `usual` tokens wins unless another is faster by more than GAIN. If
    none fits, returns the one that needs least (`needed`: bytes), whose plan then says how much.

    Tries larger and smaller sizes with their usual plan (`planned`, quick), as long as they are faster. `searched` then decides
    between the best two, if they are close: it returns what a search's plan costs, of which SEARCHED_GAIN is enough.
    """
    smaller, middle, larger = sizes_of(batch_size, length, usual=usual, most=most)
    seconds_of: dict[int, float] = {}
    if (seconds := planned(middle)) is not None:
        seconds_of[middle] = seconds
        _follow(larger, planned, seconds_of, seconds, patience=1)
    # Where compute and updates take about as long, they may wait for each other at one size, and not at the next smaller one.
    _follow(smaller, planned, seconds_of, seconds, patience=2)
    if not seconds_of:
        return min((middle, *smaller, *larger), key=needed)
    best = sorted(seconds_of, key=lambda size: (seconds_of[size], size))[:2]
    if middle in seconds_of and middle not in best and seconds_of[middle] * (1 - GAIN) <= seconds_of[best[0]]:
        best[1] = middle
    are_close = len(best) == 2 and seconds_of[best[1]] <= _NEAR * seconds_of[best[0]]
    if are_close and (costs := {size: cost for size in best if (cost := searched(size)) is not None}):
        return _fastest(costs, middle, gain=SEARCHED_GAIN)
    return _fastest(seconds_of, middle, gain=GAIN)


def _follow(
    sizes: Sequence[int], planned: Seconds, seconds_of: dict[int, float], least: float | None, *, patience: int
) -> None:
    """Tries sizes until `patience` in a row are no faster than the best before or one does not fit, or, where none fits yet,
    until one does. `least`: seconds of the best."""
    in_vain = 0
    for size in sizes:
        seconds = planned(size)
        if seconds is None:
            if least is not None:
                return
            continue
        seconds_of[size] = seconds
        in_vain = in_vain + 1 if least is not None and seconds >= least * (1 - GAIN) else 0
        if in_vain == patience:
            return
        least = least if in_vain else seconds


def _fastest(seconds_of: dict[int, float], usual: int, *, gain: float) -> int:
    """Returns the fastest size, which is faster than the usual one by `gain` of its step."""
    best = usual
    for size, seconds in sorted(seconds_of.items(), key=lambda item: (item[1], item[0])):
        if best not in seconds_of or seconds < seconds_of[best] * (1 - gain):
            best = size
    return best


_UNPLANNED_OF_A_GPU = 0.05
_LEAST_UNPLANNED = 128 * MiB  # cuBLAS alone has 32 MiB for its own use, however little a run may use
_POSITION_OFFSET = 2  # extra rows that a table of positions may have (OPT's padding)


def check_positions(recipe: Recipe, limit: int | None, learned: bool, say: Callable[[str], None]) -> None:
    """Refuses rows longer than a table of `limit` positions. Warns if positions are computed (rotary, ALiBi)."""
    length = recipe.dataset.max_seq_len
    if limit is None or length <= limit:
        return
    beyond = f"dataset.max_seq_len: {length:,} is more than the {limit:,} positions of {recipe.model.name_or_path}"
    if learned:
        raise UsageError(f"{beyond}, which has a table of them", hint=f"use at most {limit}")
    say(f"warning: {beyond} (max_position_embeddings): the model was not trained on rows this long")


def positions_of(model: PreTrainedModel) -> tuple[int | None, bool]:
    """Returns the positions that a model's configuration allows, None without a limit, and whether there is a table of them:
    learned, or made once (GPT-J, CodeGen)."""
    from torch import nn

    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None, False
    if any(name.endswith(".embed_positions") and len(table) == limit for name, table in model.named_buffers()):
        return limit, True
    tokens = model.get_input_embeddings()
    return limit, any(
        isinstance(module, nn.Embedding) and module is not tokens and 0 <= module.num_embeddings - limit <= _POSITION_OFFSET
        for module in model.modules()
    )


def check_lanes(model: ModelSpec, numerics: Numerics) -> None:
    """Refuses lanes for a model whose bits depend on which rows are computed together, or of which more than blocks is
    trained: gradients of the rest are summed over all rows at once."""
    if numerics.lanes == 1:
        return
    hint = "set train.lanes: 1, with which several processes are a ring"
    if model.draws_between:
        raise UsageError(f"train.lanes: {model.architecture} draws random numbers for all rows, between its layers", hint=hint)
    if trained := [stage.name for stage in model.stages if stage.kind in ("embedding", "head") and stage.trained]:
        raise UsageError(
            f"train.lanes: {trained[0]} is trained, and lanes are of what is between embedding and head", hint=hint
        )


def check_tokens(recipe: Recipe, vocabulary: int, summary: DataSummary) -> None:
    """Refuses token ids without one of the model's `vocabulary` embeddings, including the id that pads short rows."""
    name = recipe.tokenizer.name_or_path or recipe.model.name_or_path
    for what, number in (("token", summary.highest_token_id), ("padding", summary.pad_id)):
        if number >= vocabulary:
            raise UsageError(
                f"the tokenizer of {name} gives the {what} id {number:,}, but {recipe.model.name_or_path} has only "
                f"embeddings for ids below {vocabulary:,}",
                hint="check that tokenizer.name_or_path and tokenizer.pad_token belong to this model",
            )


def gpu_limit(recipe: Recipe, hardware: HardwareProfile) -> int | None:
    """Returns the bytes that a plan may use of a device with its own memory."""
    most = gpu_most(recipe, hardware)
    return most if most is None or hardware.device != "cuda" else for_tensors(most)


def for_tensors(memory: int) -> int:
    """Returns what tensors may take of so many bytes of a GPU: its allocator loses some to fragments, libraries some."""
    return max(0, int(memory - max(_UNPLANNED_OF_A_GPU * memory, _LEAST_UNPLANNED)))


def gpu_most(recipe: Recipe, hardware: HardwareProfile) -> int | None:
    """Returns the bytes of device memory that the process may use, without its context and the memory of other processes."""
    asked, total = recipe.offload.max_memory.gpu, hardware.device_memory
    if hardware.device == "cpu" or (asked.is_auto and not total):
        return None
    free = hardware.device_free or total  # nothing else uses a described device
    limit = asked.resolve(total=total, auto=free)
    return min(limit, free) if total else limit
