"""Names the kernels of a model's attention: those torch may use on a device, and the one it uses."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .documents import attention_apart, by_document

_KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # torch's numbers


def allowed_kernels(device: str, dtype: str, *, deterministic: bool = False) -> tuple[str, ...]:
    """Returns the kernels that scaled_dot_product_attention may choose from, for compute of `dtype` on a device of this
    name."""
    if device != "cuda":
        return "flash", "math"
    from torch.backends import cuda

    allowed = {
        "flash": cuda.flash_sdp_enabled() and dtype != "float32",
        "cudnn": cuda.cudnn_sdp_enabled() and dtype != "float32" and not deterministic,
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    return tuple(name for name, is_allowed in allowed.items() if is_allowed)


class AttentionSeen(TorchFunctionMode):
    """Notes which kernel torch uses for the first attention inside the context. `kernel`: its name, empty before."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is attention_apart:
            with self:
                return by_document(*args, **kwargs)
        if func is torch.nn.functional.scaled_dot_product_attention and not self.kernel:
            chosen = int(torch._fused_sdp_choice(*args, **kwargs))
            self.kernel = _KERNELS.get(chosen, f"kernel {chosen}")
        return func(*args, **kwargs)
