"""Calls the library's arithmetic on plain memory, in the caller's thread and without the GIL.

Arguments are contiguous objects with the buffer protocol, such as memoryviews of the arena or numpy arrays. bfloat16 arrays may
have any item type of two bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..spec.model import ITEM_SIZE, Dtype, StateLayout
from .failures import refusal_error
from .native import DTYPES, ffi, lib
from .requests import Update, native_update

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHECKSUM_BLOCK = 4096


def sum_squares(values: Buffer, dtype: Dtype) -> tuple[float, int]:
    """Returns the sum of squares in double, and how many values are not finite.

    The result is always the same to the bit: leaves of 16384 values are summed in a fixed tree, and the leaves are added in
    order. Several threads may sum leaves; added in order, they give the same total.
    """
    memory = ffi.from_buffer(values)
    total, nonfinite = ffi.new("double *"), ffi.new("uint64_t *")
    _check(lib.fy_sum_squares(memory, _count(memory, ITEM_SIZE[dtype]), DTYPES[dtype], total, nonfinite))
    return float(total[0]), int(nonfinite[0])


def split(master: Buffer, weights: Buffer, remainder: Buffer) -> int:
    """Splits float32 masters into bfloat16 weights and int16 remainders. Returns how many are not finite as bfloat16."""
    source = ffi.from_buffer("float[]", master)
    high = ffi.from_buffer("uint16_t[]", weights, require_writable=True)
    low = ffi.from_buffer("int16_t[]", remainder, require_writable=True)
    count = _same_length(source, high, low)
    nonfinite = ffi.new("uint64_t *")
    _check(lib.fy_split(source, high, low, count, nonfinite))
    return int(nonfinite[0])


def join(weights: Buffer, remainder: Buffer, master: Buffer) -> None:
    """Joins what `split` made into the float32 masters again, bit for bit."""
    high = ffi.from_buffer("uint16_t[]", weights)
    low = ffi.from_buffer("int16_t[]", remainder)
    target = ffi.from_buffer("float[]", master, require_writable=True)
    _check(lib.fy_join(high, low, target, _same_length(high, low, target)))


def checksum(data: Buffer, *, position: int = 0) -> int:
    """Returns a 64-bit checksum of a span. It depends on positions, is the same on every machine, and is not cryptographic.

    The checksum of a longer span is the sum, modulo 2^64, of its parts' checksums. Each part is given its `position` (bytes, a
    multiple of 4096).
    """
    if position % CHECKSUM_BLOCK:
        raise ValueError(f"position {position} is not a multiple of {CHECKSUM_BLOCK}")
    memory = ffi.from_buffer(data)
    return int(lib.fy_checksum(memory, len(memory), position))


def adamw(
    update: Update,
    *,
    weights: Buffer,
    remainder: Buffer | None = None,
    momentum: Buffer,
    variance: Buffer | None = None,
    gradients: Buffer,
) -> int:
    """Runs one step of `update.rule` in place over arrays of `update.params` values. Returns how many new weights are not
    finite.

    The offsets in `update` are ignored. bfloat16 weights need their `remainder`, AdamW its `variance`. int8 states are
    rows of tiles.
    """
    request, segments = native_update(update)
    if update.weights_dtype == "bfloat16" and remainder is None:
        raise ValueError("bfloat16 weights need their remainder")
    if update.rule == "adamw" and variance is None:
        raise ValueError("AdamW needs its variance")
    layout = StateLayout(weights=update.weights_dtype, dtype=update.states_dtype, rule=update.rule)
    nonfinite = ffi.new("uint64_t *")
    code = lib.fy_adamw(
        request,
        segments,
        _sized(weights, update.params * ITEM_SIZE[update.weights_dtype], "weights"),
        ffi.NULL if remainder is None else ffi.cast("int16_t *", _sized(remainder, 2 * update.params, "remainder")),
        _sized(momentum, layout.size("momentum", update.params), "momentum"),
        ffi.NULL if variance is None else _sized(variance, layout.size("variance", update.params), "variance"),
        _sized(gradients, update.params * ITEM_SIZE[update.gradients_dtype], "gradients", writable=False),
        nonfinite,
    )
    _check(code)
    return int(nonfinite[0])


def scratch_size(chunk_params: int, chunks: int) -> int:
    """Returns the bytes of arena needed for `chunks` update chunks of `chunk_params` parameters."""
    return int(lib.fy_scratch_size(chunk_params, chunks))


def build_info() -> str:
    """Returns the compiler, the version of liburing (or "no io_uring") and the loops that were compiled."""
    return str(ffi.string(lib.fy_build_info()).decode())


def has_io_uring() -> bool:
    """Tells whether this library was built with io_uring. The kernel may still refuse it."""
    return "no io_uring" not in build_info()


def _check(code: int) -> None:
    if code:
        raise refusal_error("the native kernel refused its arguments", code)


def _count(memory: Any, item: int) -> int:
    if len(memory) % item:
        raise ValueError(f"{len(memory)} bytes are not a multiple of {item}, the bytes of an item")
    return len(memory) // item


def _same_length(*arrays: Any) -> int:
    lengths = {len(array) for array in arrays}
    if len(lengths) != 1:
        raise ValueError(f"arrays of different lengths: {sorted(lengths)}")
    return int(lengths.pop())


def _sized(values: Buffer, size: int, name: str, *, writable: bool = True) -> Any:
    memory = ffi.from_buffer(values, require_writable=writable)
    if len(memory) != size:
        raise ValueError(f"{name} has {len(memory)} bytes, not {size}")
    return memory
