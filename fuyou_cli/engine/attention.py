"""Names the kernel that torch uses for a model's attention, finds a fused one for latent attention, and keeps transformers from
looking for documents in a row."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .documents import attention_apart, by_document
from .sinks import attention_with_sinks, kernel_of

SDPA = torch.nn.functional.scaled_dot_product_attention  # torch's own: `called.InAttention` puts another there for a while
ATTENTIONS = (SDPA, attention_with_sinks)  # they take the same arguments first
_KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # torch's numbers


def rows_are_whole() -> None:
    """Tells transformers, for this process, that a row of flash attention is one document. It looks at the values of a single
    row's positions otherwise: a copy from the device in every layer, and an error where a model is inspected without values.
    Rows that are divided are computed document by document (`documents`)."""
    from transformers import modeling_flash_attention_utils as flash

    flash._is_packed_sequence = lambda position_ids, batch_size: False


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Returns what transformers' own function for sdpa returns, (rows, tokens, heads, size of a value) and no weights.

    Values narrower than queries (latent attention) are filled up with zeros: torch's flash kernels take no others, and without
    one there would be scores of a row times a row: of DeepSeek-V3, 28 GiB for 4,096 tokens."""
    size, width = value.shape[-1], query.shape[-1]
    if size >= width or query.shape[2] == 1:  # one token has one row of scores
        whole: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return whole
    filled = torch.nn.functional.pad(value, (0, width - size))
    out, weights = sdpa_attention_forward(module, query, key, filled, attention_mask, **options)
    return out[..., :size], weights


ALL_ATTENTION_FUNCTIONS.register("sdpa", attend)


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
        if func is attention_with_sinks and not self.kernel:
            self.kernel = kernel_of(*args, **kwargs)
        if func is SDPA and not self.kernel:
            chosen = int(torch._fused_sdp_choice(*args, **kwargs))
            self.kernel = _KERNELS.get(chosen, f"kernel {chosen}")
        return func(*args, **kwargs)
