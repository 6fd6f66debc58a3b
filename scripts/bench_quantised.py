#!/usr/bin/env python3
"""Compares the quantised layouts: our bytes with bitsandbytes' own, and how fast both read and write them on the CPU. Of mxfp4
and fp8 nothing but speed: tests compare them with transformers.

First it compares every byte of nf4, doubly quantised nf4 and int8, both ways, for float32 and bfloat16 values of several sizes.
Then both sides decode and encode. Samples are interleaved (A B, A B, ...). Medians are over samples during which other
processes used less than 0.15 cores, if there are at least three.

bitsandbytes is no dependency of fuyou: `pip install bitsandbytes`, or name its folder in PYTHONPATH. Exit codes: 0 every byte
is equal, 1 one differs, 3 bitsandbytes is not installed and nothing was compared.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from bench_adamw import Step, measure, print_sides
from proof.verdicts import Row, described, exit_code, holds, in_words, missing

from fuyou_cli.swap import kernels
from fuyou_cli.swap.kernels import Workers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SIZES = (64 * 4096, 64 * 1000, 64 * 37 + 33, 64 * 37 + 2, 5)  # a short last block, an odd one, less than one
COLUMNS = 4096


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--params", type=int, default=32 << 20)
    parser.add_argument("--good", type=int, default=9, help="quiet samples wanted of each side")
    parser.add_argument("--max-seconds", type=float, default=20, help="per thread count and comparison")
    return parser.parse_args()


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def drawn(count: int, dtype: str) -> torch.Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 0.03
    values[: count // 50] = 0  # whole blocks of zeros among them
    return values.to(DTYPES[dtype])


def ours_nf4(values: torch.Tensor, dtype: str, workers: Workers) -> tuple[np.ndarray, np.ndarray]:
    packed = np.empty((values.numel() + 1) // 2, np.uint8)
    maxima = np.empty(-(-values.numel() // kernels.NF4_BLOCK), np.float32)
    kernels.nf4_encode(bytes_of(values), dtype, packed, maxima, workers=workers)
    return packed, maxima


# ---- bytes -----------------------------------------------------------------------------------------------------------


def nf4_differences(count: int, dtype: str) -> Iterator[int]:
    """Counts bytes that differ: codes, maxima, doubly quantised maxima and their scales, then all decoded values."""
    from bitsandbytes import functional

    values = drawn(count, dtype)
    packed, maxima = ours_nf4(values, dtype, kernels.ALONE)
    codes, state = functional.quantize_4bit(values, quant_type="nf4", blocksize=64)
    yield differing(packed, codes)
    yield differing(maxima, state.absmax)
    for name, out in DTYPES.items():
        state.dtype = out
        found = torch.empty(count, dtype=out)
        kernels.nf4_decode(packed, maxima, bytes_of(found), name)
        yield differing(bytes_of(found), functional.dequantize_4bit(codes, state))
    _, double = functional.quantize_4bit(values, quant_type="nf4", blocksize=64, compress_statistics=True)
    offset = float(double.offset)  # its mean of all maxima: the sum's order is torch's
    small, most = np.empty(maxima.size, np.uint8), np.empty(-(-maxima.size // kernels.DYNAMIC_BLOCK), np.float32)
    kernels.dynamic_encode(maxima - np.float32(offset), small, most)
    yield differing(small, double.absmax)
    yield differing(most, double.state2.absmax)
    kernels.dynamic_decode(small, most, maxima, offset=offset)
    yield differing(maxima, functional.dequantize_blockwise(double.absmax, double.state2) + double.offset)


def int8_differences(dtype: str) -> Iterator[int]:
    from bitsandbytes import functional

    values = drawn(333 * 515, dtype).view(333, 515).half()  # as its Int8Params rounds weights
    codes, most = np.empty(values.shape, np.int8), np.empty(333, np.float32)
    kernels.int8_encode(bytes_of(values.float()), 515, "float32", codes, most)
    theirs, maxima, _ = functional.int8_vectorwise_quant(values)
    yield differing(codes, theirs)
    yield differing(most, maxima)
    found = torch.empty(values.shape)
    kernels.int8_decode(codes, most, 515, bytes_of(found), "float32")
    yield differing(bytes_of(found), functional.int8_vectorwise_dequant(theirs, maxima))


def differing(ours: np.ndarray, theirs: torch.Tensor) -> int:
    return int((ours.reshape(-1).view(np.uint8) != bytes_of(theirs)).sum())


def compare() -> Iterator[Row]:
    version = metadata.version("bitsandbytes")
    for dtype in DTYPES:
        found = sum(sum(nf4_differences(count, dtype)) for count in SIZES)
        yield holds(f"nf4 of {dtype}, bytes unlike bitsandbytes {version}", "0", str(found), found == 0)
        found = sum(int8_differences(dtype))
        yield holds(f"int8 of {dtype}, bytes unlike bitsandbytes {version}", "0", str(found), found == 0)


# ---- speed -----------------------------------------------------------------------------------------------------------


def comparisons(params: int, workers: Workers, *, peer: bool) -> Iterator[tuple[str, int, dict[str, Step]]]:
    """Yields a name, the bytes that a parameter takes on both sides, and a step by side."""
    values, rows = drawn(params, "bfloat16"), params // COLUMNS
    packed, maxima = ours_nf4(values, "bfloat16", workers)
    codes, most = np.empty(params, np.int8), np.empty(rows, np.float32)
    kernels.int8_encode(bytes_of(values), COLUMNS, "bfloat16", codes, most, workers=workers)
    exponents = np.full(params // kernels.MXFP4_BLOCK, 120, np.uint8)
    squares = np.full(-(-rows // kernels.FP8_BLOCK) * (COLUMNS // kernels.FP8_BLOCK), 0.01, np.float32)
    for name, dtype in DTYPES.items():
        into, item = bytes_of(torch.zeros(params, dtype=dtype)), dtype.itemsize

        def nf4(name: str = name, into: np.ndarray = into) -> None:
            kernels.nf4_decode(packed, maxima, into, name, workers=workers)

        def int8(name: str = name, into: np.ndarray = into) -> None:
            kernels.int8_decode(codes, most, COLUMNS, into, name, workers=workers)

        theirs = their_decode(torch.from_numpy(packed), torch.from_numpy(maxima), params, dtype) if peer else None
        yield f"nf4 to {name}", item, {"fuyou": nf4, **({"bitsandbytes": theirs} if theirs else {})}

        def mxfp4(name: str = name, into: np.ndarray = into) -> None:
            kernels.mxfp4_decode(packed, exponents, into, name, workers=workers)

        def fp8(name: str = name, into: np.ndarray = into) -> None:
            kernels.fp8_decode(codes, squares, COLUMNS, into, name, workers=workers)

        yield f"int8 to {name}", item, {"fuyou": int8}
        yield f"mxfp4 to {name}", item, {"fuyou": mxfp4}
        yield f"fp8 to {name}", item, {"fuyou": fp8}
    yield "bfloat16 to nf4", 2, {"fuyou": lambda: kernels.nf4_encode(
        bytes_of(values), "bfloat16", packed, maxima, workers=workers
    )}  # fmt: skip
    yield "bfloat16 to int8", 2, {"fuyou": lambda: kernels.int8_encode(
        bytes_of(values), COLUMNS, "bfloat16", codes, most, workers=workers
    )}  # fmt: skip


def their_decode(packed: torch.Tensor, maxima: torch.Tensor, params: int, dtype: torch.dtype) -> Step:
    shape = (params // COLUMNS, COLUMNS)
    return lambda: torch.ops.bitsandbytes.dequantize_4bit.default(packed.view(-1, 1), maxima, 64, "nf4", shape, dtype)


def main() -> int:
    args = arguments()
    print(described())
    print(kernels.build_info())
    peer = find_spec("bitsandbytes") is not None
    rows = list(compare()) if peer else [missing("bytes unlike bitsandbytes", "0", "not installed")]
    for row in rows:
        print(f"  {row.what}: {row.measured} ({in_words(row)})")
    params = args.params // COLUMNS * COLUMNS
    for threads in args.threads:
        torch.set_num_threads(threads)
        with Workers(threads) as workers:
            for title, size, sides in comparisons(params, workers, peer=peer):
                print(f"\n{title}, {threads} thread{'s' if threads > 1 else ''}, {params / 1e6:.0f} M values")
                print_sides(measure(sides, args.good, args.max_seconds), params, dict.fromkeys(sides, size))
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
