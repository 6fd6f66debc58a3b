"""What a run's result depends on, from the recipe: numbers, with `auto` resolved once."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, cast

from ..core.errors import UsageError
from ..core.units import MiB
from ..spec.hardware import HardwareProfile
from ..spec.model import Dtype
from ..spec.plan import Numerics
from .micro_batches import usual_size
from .state.manifest_checks import MOST_THREADS
from .state.stored import Manifest

if TYPE_CHECKING:
    from ..engine.anatomy import Anatomy
    from ..recipe.schema import Recipe, TrainSection

THREADS_BESIDE_A_GPU = 4
HEAD_PIECE_BYTES = 256 * MiB  # what `auto` lets one piece of logits and their gradients take
_LOGIT_BYTES = 16  # per token and vocabulary entry: logits, float32 copy, softmax, gradient


def _head_chunk(train: TrainSection, tokens: int, columns: int) -> int:
    """Tokens the head takes at once, with logits of `columns` columns; 0: a whole micro-batch of `tokens`."""
    if train.head_chunk_tokens != "auto":
        return train.head_chunk_tokens
    most = max(64, HEAD_PIECE_BYTES // (_LOGIT_BYTES * columns))
    return 0 if tokens <= most else 1 << (most.bit_length() - 1)


def _usual_threads(hardware: HardwareProfile) -> int:
    """Every core where torch computes on them. Beside a GPU it copies rows: a few reach what memory gives, and the cores are
    the update's."""
    return min(hardware.cores, THREADS_BESIDE_A_GPU if hardware.device == "cuda" else MOST_THREADS)


def numerics_of(
    recipe: Recipe, anatomy: Anatomy, hardware: HardwareProfile, manifest: Manifest | None, *, micro: int | None = None
) -> Numerics:
    """What the recipe says, `auto` resolved by fixed rules, of micro-batches to `micro` rows where that is given; a resumed
    run keeps what it started with."""
    from ..engine.vocabulary import resolved_rows

    train, length = recipe.train, recipe.dataset.max_seq_len
    if train.micro_batch_size != "auto":
        micro = train.micro_batch_size
    elif manifest is not None:
        micro = manifest.numerics.micro_batch_size
    elif micro is None:
        micro = usual_size(train.batch_size, length)
    vocabulary_rows = resolved_rows(anatomy, train.head_chunk_vocab)
    columns = vocabulary_rows or anatomy.model.config.get_text_config().vocab_size
    chunk = _head_chunk(train, micro * length, columns)
    compute = cast(Dtype, recipe.precision.compute)
    # Nothing is added up, and a wider sum would hold the same numbers; but of a tied head and its embedding, whose two
    # gradients plain PyTorch adds in the compute dtype as well.
    one_piece = train.batch_size == micro and chunk == 0
    accumulate: Dtype = compute if one_piece else recipe.precision.grad_accum
    numerics = Numerics(
        compute_dtype=compute,
        accumulate_dtype="float32" if compute == "float32" else accumulate,
        batch_size=train.batch_size,
        micro_batch_size=micro,
        max_seq_len=length,
        head_chunk_tokens=chunk,
        torch_threads=_usual_threads(hardware) if train.threads == "auto" else train.threads,
        seed=recipe.seed,
        vocabulary_rows=vocabulary_rows,
    )
    if manifest is None:
        return numerics
    _refuse_changed(recipe, manifest.numerics, numerics)
    return manifest.numerics


def _refuse_changed(recipe: Recipe, kept: Numerics, asked: Numerics) -> None:
    """`auto` keeps what the run started with; a number that differs is an error."""
    names = {
        "compute_dtype": ("precision.compute", True),
        "accumulate_dtype": ("precision.grad_accum", True),
        "batch_size": ("train.batch_size", True),
        "micro_batch_size": ("train.micro_batch_size", recipe.train.micro_batch_size != "auto"),
        "max_seq_len": ("dataset.max_seq_len", True),
        "head_chunk_tokens": ("train.head_chunk_tokens", recipe.train.head_chunk_tokens != "auto"),
        "vocabulary_rows": ("train.head_chunk_vocab", recipe.train.head_chunk_vocab != "auto"),
        "torch_threads": ("train.threads", recipe.train.threads != "auto"),
        "seed": ("seed", True),
    }
    before, now = asdict(kept), asdict(asked)
    changed = [f"{key} was {before[k]}, is {now[k]}" for k, (key, fixed) in names.items() if fixed and before[k] != now[k]]
    if changed:
        raise UsageError(
            "the saved run cannot be resumed, its numerics changed: " + "; ".join(changed),
            hint="put the old values back, or start over with checkpoint.resume=never",
        )
