"""Sums squares in lanes on NVIDIA GPUs by one launch for a tensor, with the bits of the tensor operations in `lanes`.

Tensor operations read and write the float64 lanes for every value, and took 17 ms for two billion gradients on an H100, where
reading them takes 3. Here a thread keeps the lanes that it sums in registers, and folds them in the same order.
"""

from __future__ import annotations

import ctypes
import warnings

import torch

from ...planner.device import SQUARE_LANES
from .lanes import FEW, Square, squares_in_lanes
from .nvrtc import make_kernel

_COLUMNS, _ROWS = 16, 32  # threads of a block; neighbours in x read neighbouring values
_SQUARE_TYPES = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_uint)

SQUARES = r"""
#ifndef KERNEL
#define KERNEL extern "C" __global__ void __launch_bounds__(ROWS *COLUMNS)
#endif
#define FOLD(half) \
    _Pragma("unroll") for (unsigned group = 0; 2 * (half) <= GROUPS && group < (half); group++) \
        sums[group] = __dadd_rn(sums[group], sums[group + (half)]);
KERNEL squares(const VALUE *values, double *few, unsigned long long count, unsigned width)
{
    __shared__ double folded[ROWS][COLUMNS];
    const unsigned column = threadIdx.x, row = threadIdx.y, first = blockIdx.x * COLUMNS + column + FEW * row;
    double sums[GROUPS];
#pragma unroll
    for (unsigned group = 0; group < GROUPS; group++)
        sums[group] = 0.0;
    for (; count > 0; values += width) {
        const unsigned left = count < width ? (unsigned)count : width;
#pragma unroll
        for (unsigned group = 0; group < GROUPS; group++) {
            const unsigned lane = first + FEW * ROWS * group;
            if (lane < left) {
#if NARROW
                const double x = __uint_as_float((unsigned)(unsigned short)values[lane] << 16);
#else
                const double x = values[lane];
#endif
                sums[group] = __fma_rn(x, x, sums[group]); /* the square is exact, so only the addition rounds */
            }
        }
        count -= left;
    }
    FOLD(16) FOLD(8) FOLD(4) FOLD(2) FOLD(1)
    folded[row][column] = sums[0];
    for (unsigned half = ROWS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (row < half)
            folded[row][column] = __dadd_rn(folded[row][column], folded[row + half][column]);
    }
    if (row == 0)
        few[blockIdx.x * COLUMNS + column] = folded[0][column];
}
"""


def square_kernel(dtype: torch.dtype, lanes: torch.Tensor) -> Square | None:
    """Returns a function that sums squares of values of this dtype (float32 or bfloat16) on a CUDA device, after the compute
    submitted so far. Returns None if there is no compiler for it. Warns if one fails, or if what it sums is not what tensor
    operations sum in `lanes` (float64); these do it then."""
    try:
        made = make_kernel(lanes.device, "squares", SQUARES, square_definitions(narrow=dtype == torch.bfloat16))
        if made is None:
            return None

        def launch(values: torch.Tensor, few: torch.Tensor, width: int) -> None:
            assert values.dtype == dtype and few.dtype == torch.float64 and few.is_contiguous() and len(few) == FEW < width
            given = (values.data_ptr(), few.data_ptr(), values.numel(), width)
            made.launch(given, _SQUARE_TYPES, blocks=FEW // _COLUMNS, threads=(_COLUMNS, _ROWS))

        if agrees(launch, dtype, lanes):
            return launch
        why = "the kernel squares gives other bits"
    except RuntimeError as error:  # it does not compile, or cannot be launched
        why = str(error)
    warnings.warn(f"tensor operations square gradients on the GPU, several times slower: {why}", stacklevel=2)
    return None


def agrees(kernel: Square, dtype: torch.dtype, lanes: torch.Tensor) -> bool:
    """Tells whether a kernel gives the bits of tensor operations, for a drawn run that fills these lanes. If they are as many
    as a run ever has, values are left for another pass."""
    count = len(lanes) if len(lanes) < SQUARE_LANES else 2 * SQUARE_LANES + 77
    values = torch.randn(count, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(lanes.device, dtype)
    one, other = (squares_in_lanes(values, [(0, count)], lanes, kernel=some) for some in (None, kernel))
    return torch.equal(one, other)


def square_definitions(*, narrow: bool, few: int = FEW, most: int = SQUARE_LANES) -> list[str]:
    """Returns the compiler's options for these sizes and values."""
    sizes = {"COLUMNS": _COLUMNS, "ROWS": _ROWS, "FEW": few, "GROUPS": most // few // _ROWS, "NARROW": int(narrow)}
    return [*(f"-D{name}={size}" for name, size in sizes.items()), f"-DVALUE={'short' if narrow else 'float'}"]
