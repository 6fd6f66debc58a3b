"""Puts Liger's kernels in place of a model's own norms and gated products, through transformers. Its rotary embedding is left
out: it writes into the outputs of the products before it, which may be kept for backward, and torch does not see that.

This happens when a run opens, after the model was inspected and planned: Triton's kernels take no tensors without memory.
Logits and loss stay fuyou's, which computes them in pieces. What Liger changes in the model's Python module stays for the
process.
"""

from __future__ import annotations

from collections.abc import Container
from importlib import import_module
from importlib.util import find_spec

from transformers import PreTrainedModel

from ..core.errors import UsageError, pip_install

_INSTALL = f"{pip_install('fuyou[liger]')} (needs Triton and a GPU), or leave model.kernels at torch"


def check_liger(model: PreTrainedModel) -> None:
    """Raises UsageError if Liger is not installed, or has nothing for this model."""
    if find_spec("liger_kernel") is None:
        raise UsageError("model.kernels: liger: the package liger-kernel is not installed", hint=_INSTALL)
    kind = model.config.model_type
    if kind not in _families():
        raise UsageError(
            f"model.kernels: liger: liger-kernel has no kernels for models of type {kind}",
            hint="leave model.kernels at torch, or update liger-kernel",
        )


def apply_liger(model: PreTrainedModel) -> None:
    """Changes the model's blocks to compute with Liger's kernels."""
    from transformers.integrations.liger import apply_liger_kernel

    check_liger(model)
    try:
        apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False, "rope": False})
    except ImportError as error:
        raise UsageError(f"model.kernels: liger: {error}", hint=_INSTALL) from error


def _families() -> Container[str]:
    """Returns the model types that Liger has kernels for."""
    try:
        patches = import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as error:
        raise UsageError(f"model.kernels: liger: {error}", hint=_INSTALL) from error
    families: Container[str] = patches.MODEL_TYPE_TO_APPLY_LIGER_FN
    return families
