"""Computes by kernels of our own on NVIDIA GPUs: sums of squares, and AdamW, with the bits of the library in host memory."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import torch

from ...planner.device import SQUARE_LANES, square_lanes
from .base import ValueRun

FEW = 1 << 11  # from this width on the lanes of all runs are folded together, because each launch takes the host microseconds

# Sums squares of values (1-D) in so many lanes, and folds them into `FEW` (float64): the same, by one launch.
Square = Callable[[torch.Tensor, torch.Tensor, int], None]


def squares_in_lanes(
    flat: torch.Tensor, runs: Sequence[ValueRun], lanes: torch.Tensor, *, kernel: Square | None = None
) -> torch.Tensor:  # fmt: skip
    """Returns (runs,) float64 on the device of `flat`. `lanes`: float64 to compute in, at least `square_lanes` of the longest
    run. `kernel`: for long runs."""
    few = torch.zeros(len(runs), FEW, dtype=torch.float64, device=flat.device)
    for of_run, (first, count) in zip(few, runs, strict=True):
        width = square_lanes(count)
        if kernel is not None and width > FEW:
            kernel(flat[first : first + count], of_run, width)
            continue
        sums = lanes[:width].zero_() if width > FEW else of_run[:width]
        for values in flat[first : first + count].split(width):
            (sums if values.numel() == width else sums[: values.numel()]).addcmul_(values, values)
        if width > FEW:
            of_run.copy_(_folded(sums, FEW))
    return _folded(few, 1).flatten().contiguous()


def _folded(sums: torch.Tensor, width: int) -> torch.Tensor:
    """Folds the last dimension in halves, down to `width`, in place. Lanes without a value are zero."""
    left = sums.shape[-1]
    while left > width:
        left //= 2
        sums[..., :left].add_(sums[..., left : 2 * left])
    return sums[..., :left]


# ---- compiling and launching --------------------------------------------------------------------------------------
# Compiles kernels of our own for NVIDIA GPUs, and launches them. The compiler is NVRTC; torch installs its bindings beside its
# CUDA builds.


class Kernel:
    """A compiled kernel, loaded into torch's context for as long as the process lives."""

    def __init__(self, driver: Any, function: Any) -> None:
        self._driver, self._function = driver, function

    def launch(self, values: Sequence[Any], types: Sequence[Any], *, blocks: int, threads: tuple[int, int]) -> None:
        """Launches it after the compute submitted so far. `types`: of the values, as ctypes. `threads`: of a block, x and y."""
        stream = torch.cuda.current_stream().cuda_stream
        given = tuple(values), tuple(types)
        _checked(self._driver.cuLaunchKernel(self._function, blocks, 1, 1, *threads, 1, 0, stream, given, 0))


def make_kernel(device: torch.device, name: str, source: str, definitions: Sequence[str]) -> Kernel | None:
    """Compiles the kernel `name` of CUDA C for a device. Returns None if there is no compiler for it, as in builds of torch for
    other GPUs. Raises RuntimeError with the compiler's words if it fails: too old for the card, say, or too new for the driver.
    """
    if device.type != "cuda" or torch.version.hip:
        return None
    try:
        from cuda.bindings import driver, nvrtc  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    binary = cubin(nvrtc, f"sm_{major}{minor}", name, source, tuple(definitions))
    return Kernel(driver, _checked(driver.cuModuleGetFunction(_checked(driver.cuModuleLoadData(binary)), name.encode())))


@cache
def cubin(nvrtc: Any, architecture: str, name: str, source: str, definitions: tuple[str, ...]) -> bytes:
    """Compiles for an architecture such as "sm_89". Fuses nothing that the source does not fuse. Raises RuntimeError with the
    compiler's words."""
    options = [word.encode() for word in (f"--gpu-architecture={architecture}", "-fmad=false", *definitions)]
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []))
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(result):
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"the kernel {name} does not compile for {architecture}: {log.decode(errors='replace')}")
    binary: bytes = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, binary))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return binary


def _checked(returned: tuple[Any, ...]) -> Any:
    """Returns a call's result. Raises RuntimeError if the call failed."""
    status, *results = returned
    if int(status):
        raise RuntimeError(f"CUDA: {status}")
    return results[0] if results else None


# ---- sums of squares in one launch --------------------------------------------------------------------------------
# Sums squares in lanes on NVIDIA GPUs by one launch for a tensor, with the bits of `squares_in_lanes`.
#
# Tensor operations read and write the float64 lanes for every value, and took 17 ms for two billion gradients on an H100,
# where reading them takes 3. Here a thread keeps the lanes that it sums in registers, and folds them in the same order.

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
        kernel = make_kernel(lanes.device, "squares", SQUARES, square_definitions(narrow=dtype == torch.bfloat16))
        if kernel is None:
            return None

        def launch(values: torch.Tensor, few: torch.Tensor, width: int) -> None:
            assert values.dtype == dtype and few.dtype == torch.float64 and few.is_contiguous() and len(few) == FEW < width
            given = (values.data_ptr(), few.data_ptr(), values.numel(), width)
            kernel.launch(given, _SQUARE_TYPES, blocks=FEW // _COLUMNS, threads=(_COLUMNS, _ROWS))

        if agrees(launch, dtype, lanes):
            return launch
        why = "the kernel squares gives other bits"
    except RuntimeError as error:  # it does not compile, or cannot be launched
        why = str(error)
    warnings.warn(f"tensor operations square gradients on the GPU, several times slower: {why}", stacklevel=2)
    return None


def agrees(kernel: Square, dtype: torch.dtype, lanes: torch.Tensor) -> bool:
    """Whether a kernel gives the bits of tensor operations, for a drawn run that fills these lanes. If they are as many
    as a run ever has, values are left for another pass."""
    count = len(lanes) if len(lanes) < SQUARE_LANES else 2 * SQUARE_LANES + 77
    values = torch.randn(count, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(lanes.device, dtype)
    by_torch, by_kernel = (squares_in_lanes(values, [(0, count)], lanes, kernel=some) for some in (None, kernel))
    return torch.equal(by_torch, by_kernel)


def square_definitions(*, narrow: bool, few: int = FEW, most: int = SQUARE_LANES) -> list[str]:
    sizes = {"COLUMNS": _COLUMNS, "ROWS": _ROWS, "FEW": few, "GROUPS": most // few // _ROWS, "NARROW": int(narrow)}
    return [*(f"-D{name}={size}" for name, size in sizes.items()), f"-DVALUE={'short' if narrow else 'float'}"]


# ---- AdamW in one launch ------------------------------------------------------------------------------------------
# AdamW: one kernel that reads and writes every value once, with the library's bits.
#
# The same update as tensor operations (`device_states.DeviceAdamW`) takes about 25 launches for each million parameters, and
# the host needs longer to launch them than the device to run them. Every operation here is an intrinsic with one rounding,
# which the compiler never fuses.

THREADS = 256  # of a block
MOST_BLOCKS = 1 << 13  # more values than threads: a thread takes several

ADAMW = r"""
#ifndef KERNEL
#define KERNEL extern "C" __global__
#endif
KERNEL void adamw(
    WEIGHT *weights, short *remainder, float *momentum, float *variance, const GRADIENT *gradients, int *worst,
    unsigned long long count, float scale, float decay, float blend, int from_gradient, float beta2, float one_less_beta2,
    float correction, float epsilon, float negative_step)
{
    int largest = 0;
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
#if NARROW_WEIGHTS
        unsigned bits = ((unsigned)(unsigned short)weights[i] << 16) + (unsigned)(int)remainder[i];
#else
        unsigned bits = __float_as_uint(weights[i]);
#endif
#if NARROW_GRADIENTS
        float g = __uint_as_float((unsigned)(unsigned short)gradients[i] << 16);
#else
        float g = gradients[i];
#endif
        float p = __fmul_rn(__uint_as_float(bits), decay);
        float m = momentum[i];
        g = __fmul_rn(g, scale);
        float t = __fmul_rn(__fsub_rn(g, m), blend);
        m = __fadd_rn(from_gradient ? g : m, t);
        t = __fmul_rn(__fmul_rn(g, one_less_beta2), g);
        float v = __fadd_rn(__fmul_rn(variance[i], beta2), t);
        t = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), correction), epsilon);
        p = __fadd_rn(p, __fdiv_rn(__fmul_rn(m, negative_step), t));
        bits = __float_as_uint(p);
        largest = max(largest, (int)(bits & 0x7FFFFFFFu));
        momentum[i] = m;
        variance[i] = v;
#if NARROW_WEIGHTS
        weights[i] = (short)((bits + 0x8000u) >> 16);
        remainder[i] = (short)bits;
#else
        weights[i] = p;
#endif
    }
    for (int lane = 16; lane > 0; lane /= 2)
        largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, lane));
    if (threadIdx.x % 32 == 0 && largest > *(volatile int *)worst)
        atomicMax(worst, largest);
}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounded:
    """The scalars of one segment, computed in double and rounded to float32 once (`segment_scalars` in adamw.c)."""

    scale: float
    decay: float
    blend: float
    from_gradient: bool  # blend momentum starting from the gradient, like torch's lerp, so that it stays monotonic
    beta2: float
    one_less_beta2: float
    correction: float
    epsilon: float
    negative_step: float


Launch = Callable[..., None]
_POINTER, _FLOAT = ctypes.c_void_p, ctypes.c_float
_ADAMW_TYPES = (*[_POINTER] * 6, ctypes.c_ulonglong, *[_FLOAT] * 3, ctypes.c_int, *[_FLOAT] * 5)


def adamw_kernel(device: torch.device, *, narrow_weights: bool, narrow_gradients: bool) -> Launch | None:
    """Returns a function that updates values of these dtypes on a CUDA device (`narrow`: bfloat16). Returns None if there is no
    compiler for it, as in builds of torch for other GPUs, and warns if one fails; tensor operations then do the same.

    The function takes weights, remainder (None with float32 weights), momentum, variance, gradients and the largest bits of a
    master so far (0-D int32), all on the device, and the `Rounded` scalars. It runs after the compute submitted so far."""
    try:
        kernel = make_kernel(device, "adamw", ADAMW, adamw_definitions(narrow_weights, narrow_gradients))
    except RuntimeError as error:
        warnings.warn(f"tensor operations update what rests on the GPU, several times slower: {error}", stacklevel=2)
        return None
    if kernel is None:
        return None

    def launch(
        weights: torch.Tensor, remainder: torch.Tensor | None, momentum: torch.Tensor, variance: torch.Tensor,
        gradients: torch.Tensor, worst: torch.Tensor, rounded: Rounded,
    ) -> None:  # fmt: skip
        tensors = (weights, remainder, momentum, variance, gradients, worst)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        values = (*addresses, weights.numel(), *astuple(rounded))
        kernel.launch(values, _ADAMW_TYPES, blocks=min(MOST_BLOCKS, -(-weights.numel() // THREADS)), threads=(THREADS, 1))

    return launch


def adamw_definitions(narrow_weights: bool, narrow_gradients: bool) -> list[str]:
    kinds = [("WEIGHT", narrow_weights), ("GRADIENT", narrow_gradients)]
    types = [f"-D{name}={'short' if narrow else 'float'}" for name, narrow in kinds]
    return types + [f"-DNARROW_{name}S={int(narrow)}" for name, narrow in kinds]
