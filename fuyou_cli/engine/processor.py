"""Says what the processor computes fast. A file of its own: who imports it loads no torch before asking."""

from __future__ import annotations


def has_fast_bfloat16() -> bool:
    """Whether torch multiplies bfloat16 matrices by kernels of their own on this processor."""
    import torch

    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a build without oneDNN, of which nothing is known
        return True
