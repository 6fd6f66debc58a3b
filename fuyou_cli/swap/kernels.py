"""Calls the library's arithmetic on plain memory, on the caller's own thread and without the GIL.

Arguments are anything with the buffer protocol (memoryviews of the arena, numpy arrays), contiguous; bfloat16 travels
as two-byte items of any type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..spec.model import ITEM_SIZE, Dtype
from .failures import refusal_error
from .native import DTYPES, ffi, lib
from .requests import Update, native_update

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHECKSUM_BLOCK = 4096


def sum_squares(values: Buffer, dtype: Dtype) -> tuple[float, int]:
    """Returns the sum of squares in double, and how many values are not finite.

    Always the same bits: leaves of 16384 values are summed with a fixed tree and added in order, so the sums of the
    leaves, taken by whatever threads and added in order, give the same total.
    """
    memory = ffi.from_buffer(values)
    total, nonfinite = ffi.new("double *"), ffi.new("uint64_t *")
    _check(lib.fy_sum_squares(memory, _count(memory, ITEM_SIZE[dtype]), DTYPES[dtype], total, nonfinite))
    return float(total[0]), int(nonfinite[0])


def split(master: Buffer, weights: Buffer, remainder: Buffer) -> int:
    """Splits float32 masters into bfloat16 weights and int16 remainders; returns how many are not finite as bfloat16."""
    source = ffi.from_buffer("float[]", master)
    high = ffi.from_buffer("uint16_t[]", weights, require_writable=True)
    low = ffi.from_buffer("int16_t[]", remainder, require_writable=True)
    count = _same_length(source, high, low)
    nonfinite = ffi.new("uint64_t *")
    _check(lib.fy_split(source, high, low, count, nonfinite))
    return int(nonfinite[0])


def join(weights: Buffer, remainder: Buffer, master: Buffer) -> None:
    """Joins the float32 masters that `split` took apart, bit for bit."""
    high = ffi.from_buffer("uint16_t[]", weights)
    low = ffi.from_buffer("int16_t[]", remainder)
    target = ffi.from_buffer("float[]", master, require_writable=True)
    _check(lib.fy_join(high, low, target, _same_length(high, low, target)))


def checksum(data: Buffer, *, position: int = 0) -> int:
    """Returns a 64-bit checksum of a span: position-sensitive, the same on every machine, not cryptographic. A longer span's
    is the sum of its parts' modulo 2^64, each told its `position` (bytes, a multiple of 4096)."""
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
    variance: Buffer,
    gradients: Buffer,
) -> int:
    """Runs one AdamW step in place over arrays of `update.params` values (its offsets are ignored); returns how many new
    weights are not finite. `remainder` is needed for bfloat16 weights."""
    request, segments = native_update(update)
    if update.weights_dtype == "bfloat16" and remainder is None:
        raise ValueError("bfloat16 weights need their remainder")
    nonfinite = ffi.new("uint64_t *")
    code = lib.fy_adamw(
        request,
        segments,
        _sized(weights, update.params * ITEM_SIZE[update.weights_dtype], "weights"),
        ffi.NULL if remainder is None else ffi.cast("int16_t *", _sized(remainder, 2 * update.params, "remainder")),
        ffi.cast("float *", _sized(momentum, 4 * update.params, "momentum")),
        ffi.cast("float *", _sized(variance, 4 * update.params, "variance")),
        _sized(gradients, update.params * ITEM_SIZE[update.gradients_dtype], "gradients", writable=False),
        nonfinite,
    )
    _check(code)
    return int(nonfinite[0])


def scratch_size(chunk_params: int, chunks: int) -> int:
    """Returns the bytes of arena that `chunks` update chunks of `chunk_params` parameters take."""
    return int(lib.fy_scratch_size(chunk_params, chunks))


def build_info() -> str:
    """Names the compiler, the liburing version or "no io_uring", and the loops that were compiled."""
    return str(ffi.string(lib.fy_build_info()).decode())


def has_io_uring() -> bool:
    """Tells whether this library was built with io_uring; the kernel may refuse it all the same."""
    return "no io_uring" not in build_info()


def _check(code: int) -> None:
    if code:
        raise refusal_error("the native kernel refused its arguments", code)


def _count(memory: Any, item: int) -> int:
    if len(memory) % item:
        raise ValueError(f"{len(memory)} bytes are not whole items of {item} bytes")
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
