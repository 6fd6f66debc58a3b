"""Computes attention with sinks by torch's fused kernels, without scores of a row times a row.

A sink is one more logit of each head, which attends to nothing. Softmax over scores and sink is softmax over the scores times
sigmoid(lse - sink), where lse is the scores' log-sum-exp. So the kernel's output is scaled. Backward is the kernel's own, for
the scaled output and logaddexp(lse, sink): it makes each weight anew as exp(score - lse). Torch gives a log-sum-exp no
gradient, so both are put together by hand.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Kernel = Literal["math", "flash", "efficient"]

NAME = "fused_with_sinks"  # transformers checks a name with "sdpa" or "flash" in it against what a model's class says
FAMILIES = ("gpt_oss", "granite_swa", "granitemoe_swa", "flint")  # compared with their own attention; others stay eager

_aten = torch.ops.aten
_ALIGNED = 16  # elements: of the rows of a mask, for the efficient kernel


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    s_aux: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Returns what an attention function of transformers returns, (rows, tokens, heads, size) and no weights. `s_aux`: the sink
    of each head."""
    length = query.shape[2]
    asked = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_causal = bool(asked) and length > 1 and attention_mask is None
    if is_causal:
        key, value = key[:, :, :length], value[:, :, :length]  # of a cache with room behind the row
    out = computed(query, key, value, attention_mask, dropout, is_causal, scale=scaling, sinks=s_aux)
    return out.transpose(1, 2).contiguous(), None


def attention_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Returns torch's `scaled_dot_product_attention` of these, with `sinks`, one for each head of the query. Keys and values
    may have fewer heads. attn_mask: boolean (True: attends), or added to scores; (1 or rows, 1 or heads, tokens, tokens)."""
    if has_torch_function((query,)):
        given = query, key, value, attn_mask, dropout_p, is_causal
        found: torch.Tensor = handle_torch_function(attention_with_sinks, (query,), *given, scale=scale, sinks=sinks)
        return found
    kernel = kernel_of(query, key, value, attn_mask, dropout_p, is_causal)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    bias = _added(attn_mask, query.dtype)
    # Flash reads a group's keys and values where they are. With a mask a GPU takes another kernel: a plan, which is made of CPU
    # tensors, counts what it needs.
    if (kernel != "flash" or bias is not None) and query.shape[1] > key.shape[1]:
        key, value = (repeat_kv(tensor, query.shape[1] // key.shape[1]) for tensor in (key, value))
    if kernel == "math":
        return _unfused(query, key, value, bias, dropout_p, is_causal, scale, sinks)
    if kernel == "efficient" and bias is not None:
        bias = _aligned(bias).expand(*query.shape[:3], key.shape[2])
    out: torch.Tensor = WithSinks.apply(query, key, value, sinks, bias, is_causal, scale, kernel)  # type: ignore[no-untyped-call]
    return out


def kernel_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> Kernel:
    """Returns the kernel that computes this, among those that are not turned off. It goes by what torch says of its kernels, as
    torch's own choice needs values and a compiler cannot trace it. Dropout is left to "math"."""
    unlike = value.shape[-1] != query.shape[-1] or any(tensor.stride(-1) != 1 for tensor in (query, key, value))
    if dropout_p or unlike:
        return "math"
    allowed: Kernel = _allowed(query.device.type, query.dtype, query.shape[-1], attn_mask is not None)
    return allowed


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _allowed(device: str, dtype: torch.dtype, size: int, masked: bool) -> Kernel:
    """Returns the kernel for heads of this size. On a GPU, flash takes no masks."""
    settings = torch.backends.cuda
    if device == "cpu":
        return "flash" if settings.flash_sdp_enabled() else "math"
    newer = device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    halves = dtype in (torch.bfloat16, torch.float16)
    flash = settings.flash_sdp_enabled() and settings.is_flash_attention_available()
    if flash and newer and halves and not masked and size % 8 == 0 and size <= 256:
        return "flash"
    aligned = size * dtype.itemsize % 16 == 0 and dtype != torch.float64
    fits = device == "cuda" and aligned and (newer or dtype != torch.bfloat16)
    return "efficient" if fits and settings.mem_efficient_sdp_enabled() else "math"


class WithSinks(torch.autograd.Function):
    """Computes attention with sinks by one kernel. All that backward reads goes through autograd's hooks."""

    saves_by_hooks = True

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor,
        bias: torch.Tensor | None,
        is_causal: bool,
        scale: float,
        kernel: Kernel,
    ) -> torch.Tensor:
        if kernel == "efficient":
            out, lse, *rest = _aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, True, 0.0, is_causal, scale=scale
            )
        elif query.device.type == "cpu":
            out, lse, *rest = _aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale
            )
        else:
            out, lse, *rest = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)
        sink = sinks.to(lse.dtype)[:, None]
        share = torch.sigmoid(lse[..., : query.shape[2]] - sink).unsqueeze(-1)  # the efficient kernel rounds tokens up
        scaled: torch.Tensor = out.clone().mul_(share)  # the kernel's own may be kept; rounded once
        ctx.save_for_backward(query, key, value, sinks, bias, scaled, torch.logaddexp(lse, sink))
        ctx.options = is_causal, scale, kernel, rest
        return scaled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, bias, out, lse = ctx.saved_tensors
        is_causal, scale, kernel, rest = ctx.options
        given = grad, query, key, value
        if kernel == "efficient":
            found = _aten._scaled_dot_product_efficient_attention_backward(
                *given, bias, out, lse, *rest, 0.0, [True, True, True, False], is_causal, scale=scale
            )
        elif query.device.type == "cpu":
            found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *given, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale
            )
        else:
            found = _aten._scaled_dot_product_flash_attention_backward(
                *given, out, lse, *rest[:4], 0.0, is_causal, *rest[4:6], scale=scale
            )
        of_sinks = None
        if ctx.needs_input_grad[3]:
            weights = torch.exp(sinks.to(lse.dtype)[:, None] - lse[..., : query.shape[2]])  # what each token gives its sink
            of_sinks = -(weights * (grad.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return *found[:3], of_sinks, None, None, None, None


def _added(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns what is added to scores."""
    if mask is None or mask.dtype != torch.bool:
        return None if mask is None else mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    """Returns the same in memory whose rows begin where the efficient kernel can read them."""
    size = bias.shape[-1]
    return bias if size % _ALIGNED == 0 else nn.functional.pad(bias, (0, -size % _ALIGNED))[..., :size]


def _unfused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Computes attention by products, where no kernel can: with dropout, or on another device."""
    scores = query @ key.transpose(-2, -1) * scale
    if is_causal:
        after = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(after, -torch.inf)
    elif bias is not None:
        scores = scores + bias
    logits = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))[..., :-1]
    return nn.functional.dropout(weights, dropout_p).to(value.dtype) @ value


computed = attention_with_sinks  # what `attend` calls: `operators.InAttention` puts another there for a while
ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
