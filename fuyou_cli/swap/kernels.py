"""Calls the library's arithmetic on plain memory, in the caller's thread and without the GIL: the update, checksums, and the
quantised layouts of bitsandbytes (nf4, its doubly quantised maxima, rows of int8). Decodes mxfp4 and fp8, too
(`spec/packed_tensors`).

Arguments are contiguous objects with the buffer protocol, such as memoryviews of the arena or numpy arrays. bfloat16 arrays may
have any item type of two bytes. A quantised tensor may be worked on in parts that begin at a whole block or row; all bytes are
the same whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fuyou_cli.core.errors import UsageError
from fuyou_cli.spec.model import ITEM_SIZE, Dtype, StateLayout

from .native import DTYPES, Update, ffi, lib, native_update, refusal_error

if TYPE_CHECKING:
    from typing_extensions import Buffer

# numpy is imported where something is computed: a plan, which loads neither numpy nor torch, asks for sizes alone.
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
    """Whether this library was built with io_uring. The kernel may still refuse it."""
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


# ---- quantised weights -----------------------------------------------------------------------------------------------


NF4_BLOCK: int = lib.FY_NF4_BLOCK
DYNAMIC_BLOCK: int = lib.FY_DYNAMIC_BLOCK
MXFP4_BLOCK: int = lib.FY_MXFP4_BLOCK
FP8_BLOCK: int = lib.FY_FP8_BLOCK
_FEWEST_BLOCKS = 4096  # for one worker: fewer take less time than it takes to ask
_DECADES = 7  # of the dynamic codes' exponents


class Workers:
    """Owns threads that share the blocks of a call. One worker is the caller's own thread."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="quantised") if count > 1 else None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads."""
        if self._threads is not None:
            self._threads.shutdown()

    def share(self, blocks: int, work: Callable[[int, int], int], *, fewest: int = _FEWEST_BLOCKS) -> int:
        """Calls `work` with runs of blocks [first, end), `fewest` or more, that make up all of them; returns the sum of what it
        returns."""
        runs = max(1, min(self.count, blocks // fewest))
        if self._threads is None or runs == 1:
            return work(0, blocks)
        edges = [blocks * part // runs for part in range(runs + 1)]
        return sum(self._threads.map(work, edges[:-1], edges[1:]))


ALONE = Workers()


def nf4_encode(values: Buffer, dtype: Dtype, packed: Buffer, maxima: Buffer, *, workers: Workers = ALONE) -> None:
    """Quantises n values to `packed` ((n + 1) // 2 bytes) and float32 `maxima` (of every 64). Raises UsageError where a
    value is not finite."""
    source, target, most = _array(values, ITEM_SIZE[dtype]), _array(packed, 1), _array(maxima, 4)
    blocks = _nf4_blocks(source, target, most)

    def work(first: int, end: int) -> int:
        part = source[first * NF4_BLOCK : end * NF4_BLOCK]
        place = _at(target[first * NF4_BLOCK // 2 :], "uint8_t[]"), _at(most[first:], "float[]")
        return _lost(lib.fy_nf4_encode, _at(part), part.size, DTYPES[dtype], *place)

    _refuse(workers.share(blocks, work))


def nf4_decode(packed: Buffer, maxima: Buffer, values: Buffer, dtype: Dtype, *, workers: Workers = ALONE) -> None:
    """Fills `values` with what `packed` and `maxima` of `nf4_encode` stand for."""
    source, most, target = _array(packed, 1), _array(maxima, 4), _array(values, ITEM_SIZE[dtype])
    blocks = _nf4_blocks(target, source, most)

    def work(first: int, end: int) -> int:
        part = target[first * NF4_BLOCK : end * NF4_BLOCK]
        place = _at(source[first * NF4_BLOCK // 2 :], "uint8_t[]"), _at(most[first:], "float[]")
        return _checked(lib.fy_nf4_decode(*place, part.size, DTYPES[dtype], _at(part)))

    workers.share(blocks, work)


@cache
def nf4_levels() -> Any:
    """Returns the 16 rising float32 levels of nf4 (Dettmers et al. 2023, arXiv 2305.14314)."""
    import numpy as np

    codes, maximum, levels = bytes(code << 4 for code in range(16)), np.ones(1, np.float32), np.empty(32, np.float32)
    nf4_decode(codes, maximum.data, levels.data, "float32")
    return levels[::2].copy()


def int8_encode(values: Buffer, columns: int, dtype: Dtype, codes: Buffer, maxima: Buffer, *, workers: Workers = ALONE) -> None:
    """Quantises rows of `columns` values to int8 `codes` and float32 `maxima` of rows. Raises UsageError where a value is not
    finite. (bitsandbytes rounds weights to float16 before.)"""
    source, target, most = _array(values, ITEM_SIZE[dtype]), _array(codes, 1), _array(maxima, 4)
    rows = _rows(source, target, most, columns)

    def work(first: int, end: int) -> int:
        place = _at(target[first * columns :], "int8_t[]"), _at(most[first:], "float[]")
        return _lost(lib.fy_int8_encode, _at(source[first * columns :]), end - first, columns, DTYPES[dtype], *place)

    _refuse(workers.share(rows, work))


def int8_decode(codes: Buffer, maxima: Buffer, columns: int, values: Buffer, dtype: Dtype, *, workers: Workers = ALONE) -> None:
    """Fills `values` with what rows of `columns` codes and the `maxima` of `int8_encode` stand for."""
    source, most, target = _array(codes, 1), _array(maxima, 4), _array(values, ITEM_SIZE[dtype])
    rows = _rows(target, source, most, columns)

    def work(first: int, end: int) -> int:
        place = _at(source[first * columns :], "int8_t[]"), _at(most[first:], "float[]")
        return _checked(lib.fy_int8_decode(*place, end - first, columns, DTYPES[dtype], _at(target[first * columns :])))

    workers.share(rows, work)


def mxfp4_decode(packed: Buffer, exponents: Buffer, values: Buffer, dtype: Dtype, *, workers: Workers = ALONE) -> None:
    """Fills `values`, whole blocks, with what `packed` and the `exponents` of every 32 stand for."""
    source, powers, target = _array(packed, 1), _array(exponents, 1), _array(values, ITEM_SIZE[dtype])
    _same(source.size, target.size // 2, powers.size * MXFP4_BLOCK, target.size)

    def work(first: int, end: int) -> int:
        place = _at(source[first * MXFP4_BLOCK // 2 :], "uint8_t[]"), _at(powers[first:], "uint8_t[]")
        return _checked(lib.fy_mxfp4_decode(*place, end - first, DTYPES[dtype], _at(target[first * MXFP4_BLOCK :])))

    workers.share(powers.size, work)


def fp8_decode(codes: Buffer, scales: Buffer, columns: int, values: Buffer, dtype: Dtype, *, workers: Workers = ALONE) -> None:
    """Fills `values` with what rows of `columns` codes and the float32 `scales` of their squares stand for. The first row
    begins a square."""
    source, factors, target = _array(codes, 1), _array(scales, 4), _array(values, ITEM_SIZE[dtype])
    rows, across = source.size // columns, -(-columns // FP8_BLOCK)
    down = -(-rows // FP8_BLOCK)
    _same(source.size, target.size, rows * columns, target.size, factors.size, down * across)

    def work(first: int, end: int) -> int:
        begin, last = first * FP8_BLOCK, min(end * FP8_BLOCK, rows)
        place = _at(source[begin * columns :], "uint8_t[]"), _at(factors[first * across :], "float[]")
        return _checked(lib.fy_fp8_decode(*place, last - begin, columns, DTYPES[dtype], _at(target[begin * columns :])))

    workers.share(down, work, fewest=1 + _FEWEST_BLOCKS * NF4_BLOCK // (FP8_BLOCK * columns))


# ---- double quantisation: maxima of nf4 in eight bits ----------------------------------------------------------------


@cache
def dynamic_levels() -> Any:
    """Returns the 256 rising float32 levels of the signed dynamic type (Dettmers 2015, arXiv 1511.04561): seven decades, each
    with twice the levels of the one below, zero and one."""
    import numpy as np

    levels = [0.0, 1.0]
    for decade in range(_DECADES):
        edges = _line(2**decade + 1)
        middles = (edges[:-1] + edges[1:]) / np.float32(2)
        scaled = np.float32(10.0 ** (decade - _DECADES + 1)) * middles
        levels += [*scaled.tolist(), *(-scaled).tolist()]
    return np.array(sorted(levels), np.float32)


def _line(count: int) -> Any:
    """Returns float32 points from 0.1 to 1 as torch spaces them: each half is counted from its own end, rounded once."""
    import numpy as np

    low, high = np.float32(0.1), np.float32(1)
    step = np.float64((high - low) / np.float32(count - 1))
    places = np.arange(count, dtype=np.float64)
    return np.where(places < count // 2, low + step * places, high - step * (count - 1 - places)).astype(np.float32)


def dynamic_encode(values: Buffer, codes: Buffer, maxima: Buffer) -> None:
    """Quantises float32 values to one byte each and float32 `maxima` (of every 256). Raises UsageError where one is not
    finite."""
    source, target, most = _array(values, 4), _array(codes, 1), _array(maxima, 4)
    _same(target.size, source.size, most.size, -(-source.size // DYNAMIC_BLOCK))
    place = _at(target, "uint8_t[]"), _at(most, "float[]")
    _refuse(_lost(lib.fy_dynamic_encode, _at(source, "float[]"), source.size, _at(dynamic_levels(), "float[]"), *place))


def dynamic_decode(codes: Buffer, maxima: Buffer, values: Buffer, *, offset: float) -> None:
    """Fills float32 `values` with what `dynamic_encode` was given, plus `offset`."""
    source, most, target = _array(codes, 1), _array(maxima, 4), _array(values, 4)
    _same(source.size, target.size, most.size, -(-target.size // DYNAMIC_BLOCK))
    place = _at(source, "uint8_t[]"), _at(most, "float[]")
    _checked(lib.fy_dynamic_decode(*place, target.size, _at(dynamic_levels(), "float[]"), offset, _at(target, "float[]")))


# ---- arguments -------------------------------------------------------------------------------------------------------


def _array(values: Buffer, item: int) -> Any:
    """Returns a view of the memory as unsigned items."""
    import numpy as np

    return np.frombuffer(memoryview(values), f"u{item}")


def _at(array: Any, kind: str = "char[]") -> Any:
    return ffi.from_buffer(kind, array)


def _nf4_blocks(values: Any, packed: Any, maxima: Any) -> int:
    blocks: int = -(-values.size // NF4_BLOCK)
    _same(packed.size, (values.size + 1) // 2, maxima.size, blocks)
    return blocks


def _rows(values: Any, codes: Any, maxima: Any, columns: int) -> int:
    _same(codes.size, values.size, maxima.size * columns, values.size)
    return int(maxima.size)


def _same(*sizes: int) -> None:
    """Raises ValueError unless the sizes are equal, pair by pair."""
    if sizes[::2] != sizes[1::2]:
        raise ValueError(f"arrays of {sizes[::2]} items where {sizes[1::2]} are needed")


def _checked(code: int) -> int:
    if code:
        raise refusal_error("the native codec refused its arguments", code)
    return 0


def _lost(encode: Callable[..., int], *arguments: Any) -> int:
    """Calls an encoder; returns how many values are not finite."""
    nonfinite = ffi.new("uint64_t *")
    _checked(encode(*arguments, nonfinite))
    return int(nonfinite[0])


def _refuse(nonfinite: int) -> None:
    if nonfinite:
        raise UsageError(f"{nonfinite} values are NaN or Inf and cannot be quantised", hint="use a checkpoint without them")
