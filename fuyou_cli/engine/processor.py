"""Says what the processor computes fast. A file of its own: who imports it loads no torch before asking."""

from __future__ import annotations


def has_fast_bfloat16() -> bool:
    """Whether torch multiplies bfloat16 matrices by kernels of their own on this processor."""
    import torch

    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a build without oneDNN, of which nothing is known
        return True


def slow_bfloat16(dtype: str, device: str) -> str:
    """Says what to do where products of this dtype are slow on this device; "" where they are not. torch has fast ones for
    processors with AVX-512 or better only."""
    if dtype != "bfloat16" or device != "cpu" or has_fast_bfloat16():
        return ""
    return "without AVX-512 a processor takes tens of times as long for bfloat16 as for float32"
