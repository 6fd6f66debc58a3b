"""AdamW: one kernel that reads and writes every value once, with the library's bits.

The same update as tensor operations (`device_states.DeviceAdamW`) takes about 25 launches for each million parameters, and the host needs
longer to launch them than the device to run them. Every operation here is an intrinsic with one rounding, which the compiler
never fuses.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch

from .devices.nvrtc import make_kernel

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
    """Holds the scalars of one segment, computed in double and rounded to float32 once (`segment_scalars` in adamw.c)."""

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
        made = make_kernel(device, "adamw", ADAMW, adamw_definitions(narrow_weights, narrow_gradients))
    except RuntimeError as error:
        warnings.warn(f"tensor operations update what rests on the GPU, several times slower: {error}", stacklevel=2)
        return None
    if made is None:
        return None

    def launch(
        weights: torch.Tensor, remainder: torch.Tensor | None, momentum: torch.Tensor, variance: torch.Tensor,
        gradients: torch.Tensor, worst: torch.Tensor, rounded: Rounded,
    ) -> None:  # fmt: skip
        tensors = (weights, remainder, momentum, variance, gradients, worst)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        values = (*addresses, weights.numel(), *astuple(rounded))
        made.launch(values, _ADAMW_TYPES, blocks=min(MOST_BLOCKS, -(-weights.numel() // THREADS)), threads=(THREADS, 1))

    return launch


def adamw_definitions(narrow_weights: bool, narrow_gradients: bool) -> list[str]:
    """Returns the compiler's options that choose the dtypes."""
    kinds = [("WEIGHT", narrow_weights), ("GRADIENT", narrow_gradients)]
    types = [f"-D{name}={'short' if narrow else 'float'}" for name, narrow in kinds]
    return types + [f"-DNARROW_{name}S={int(narrow)}" for name, narrow in kinds]
