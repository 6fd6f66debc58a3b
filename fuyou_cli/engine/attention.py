"""Keeps the documents of a row apart (`dataset.packing: isolated`), computes attention with sinks, and chooses the kernel of a
model's attention.

Positions begin anew in each document, and the model's own attention function is called for one document after the other. So
each is computed as in a row of its own, and no mask or score is as large as a row times a row. All of it is one operator to
whatever counts operators, so a plan does not depend on how many documents there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from ..core.errors import UsageError
from ..spec.plan import rounded_up

Documents = Sequence[Sequence[int]]  # for each row, the tokens of its documents. They fill the row: padding is the last one.

_BY_POSITION = ("position_embeddings", "position_ids")  # a block's arguments with a value for each position
_OTHERS = ("attention_mask", "cache_position")  # a mask is cut where attention is computed; the other is not read


def longest(documents: Documents, step: int = 0) -> int:
    """Returns the tokens that attention computes the longest document in. `step`: of `rounded_up`."""
    return rounded_up(max(max(lengths) for lengths in documents), step)


@contextmanager
def attending_apart(documents: Documents, step: int = 0) -> Iterator[None]:
    """Makes every attention function that a model asks transformers for inside the context compute document by document.
    `step`: of `rounded_up`, the lengths that documents are computed in."""
    choose = ALL_ATTENTION_FUNCTIONS.get_interface

    def chosen(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return partial(attention_apart, partial(attended, choose(name, default), step), documents)

    ALL_ATTENTION_FUNCTIONS.get_interface = chosen
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS.__dict__["get_interface"]


def attended(attend: Callable[..., Any], step: int, module: Any, *document: Any, **options: Any) -> torch.Tensor:
    """Returns the attention of one document, (1, tokens, heads, size). query, key, value: (1, heads, tokens, size), then a mask
    at least as long, or None.

    It is computed in a length of `rounded_up`, since a library keeps code for each length (oneDNN in bfloat16 some MiB). What
    is added comes after the document, where no token of it looks.
    """
    *qkv, mask = document
    size = qkv[0].shape[2]
    length = rounded_up(size, step)
    if length > size:
        qkv = [nn.functional.pad(tensor, (0, 0, 0, length - size)) for tensor in qkv]
    attended_rows: torch.Tensor = attend(module, *qkv, None if mask is None else mask[..., :length, :length], **options)[0]
    return attended_rows[:, :size]


def attention_apart(
    attend: Callable[..., Any], documents: Documents, module: Any, query: torch.Tensor, *others: Any, **options: Any
) -> Any:
    """Runs `by_document` as one function for torch: a mode sees one call, however many documents there are."""
    if has_torch_function((query,)):
        return handle_torch_function(attention_apart, (query,), attend, documents, module, query, *others, **options)
    return by_document(attend, documents, module, query, *others, **options)


def by_document(
    attend: Callable[..., Any], documents: Documents, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Returns what an attention function of transformers returns, (rows, tokens, heads, size) and no weights.

    attend: `attended` of a model's own function. query, key, value: (rows, heads, tokens, size). attention_mask: of one row
    at least as long as the longest document is computed in.
    """
    options.pop("position_ids", None)  # flash attention would look for documents in them
    rows = zip(documents, *(tensor.split(1) for tensor in (query, key, value)), strict=True)
    outputs = []
    for lengths, *row in rows:
        for document in zip(*(tensor.split(list(lengths), dim=2) for tensor in row), strict=True):
            outputs.append(attend(module, *document, attention_mask, **options))
    together = torch.cat(outputs, dim=1)
    return together.view(query.shape[0], query.shape[2], *together.shape[2:]), None


def laid_out(named: dict[str, Any], documents: Documents) -> dict[str, Any]:
    """Returns a block's arguments with positions that begin anew in each document. Of one row, they become one for each row."""

    def among(value: torch.Tensor) -> torch.Tensor:
        parts = torch.cat([value[:, :size] for lengths in documents for size in lengths], dim=1)
        return parts.view(len(documents), -1, *value.shape[2:])

    return named | {key: tree_map_only(torch.Tensor, among, named[key]) for key in _BY_POSITION if key in named}


def check_arguments(name: str, positional: tuple[Any, ...], named: dict[str, Any], tokens: int) -> None:
    """Raises UsageError for a tensor that a block gets beside its input, and that may depend on positions in a way not known
    here."""
    for key, given in (*named.items(), ("an argument without a name", positional)):
        for value in tree_leaves(given):
            by_position = key in _BY_POSITION and isinstance(value, torch.Tensor) and tuple(value.shape[:2]) == (1, tokens)
            if isinstance(value, torch.Tensor) and key not in _OTHERS and not by_position:
                raise UsageError(f"{name} takes {key}, a tensor of shape {tuple(value.shape)}, which cannot be cut by document")


# ---- attention with sinks --------------------------------------------------------------------------------------------
# Computes attention with sinks by torch's fused kernels, without scores of a row times a row.
#
# A sink is one more logit of each head, which attends to nothing. Softmax over scores and sink is softmax over the scores times
# sigmoid(lse - sink), where lse is the scores' log-sum-exp. So the kernel's output is scaled. Backward is the kernel's own, for
# the scaled output and logaddexp(lse, sink): it makes each weight anew as exp(score - lse). Torch gives a log-sum-exp no
# gradient, so both are put together by hand.

AttentionKernel = Literal["math", "flash", "efficient"]

SINKS = "fused_with_sinks"  # transformers checks a name with "sdpa" or "flash" in it against what a model's class says
WITH_SINKS = ("gpt_oss", "granite_swa", "granitemoe_swa", "flint")  # compared with their own attention; others stay eager

_aten = torch.ops.aten
_ALIGNED = 16  # elements: of the rows of a mask, for the efficient kernel


def attend_with_sinks(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, *,
    s_aux: torch.Tensor, dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Returns what an attention function of transformers returns, (rows, tokens, heads, size) and no weights. `s_aux`: the sink
    of each head."""
    length = query.shape[2]
    asked = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_causal = bool(asked) and length > 1 and attention_mask is None
    if is_causal:
        key, value = key[:, :, :length], value[:, :, :length]  # of a cache with room behind the row
    out = computed_with_sinks(query, key, value, attention_mask, dropout, is_causal, scale=scaling, sinks=s_aux)
    return out.transpose(1, 2).contiguous(), None


def attention_with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, sinks: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Returns torch's `scaled_dot_product_attention` of these, with `sinks`, one for each head of the query. Keys and values
    may have fewer heads. attn_mask: boolean (True: attends), or added to scores; (1 or rows, 1 or heads, tokens, tokens)."""
    if has_torch_function((query,)):
        given = query, key, value, attn_mask, dropout_p, is_causal
        handled: torch.Tensor = handle_torch_function(attention_with_sinks, (query,), *given, scale=scale, sinks=sinks)
        return handled
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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **_: Any,
) -> AttentionKernel:  # fmt: skip
    """Returns the kernel that computes this, among those that are not turned off. It goes by what torch says of its kernels, as
    torch's own choice needs values and a compiler cannot trace it. Dropout is left to "math"."""
    unlike = value.shape[-1] != query.shape[-1] or any(tensor.stride(-1) != 1 for tensor in (query, key, value))
    if dropout_p or unlike:
        return "math"
    allowed: AttentionKernel = _allowed(query.device.type, query.dtype, query.shape[-1], attn_mask is not None)
    return allowed


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _allowed(device: str, dtype: torch.dtype, size: int, masked: bool) -> AttentionKernel:
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
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, bias: torch.Tensor | None,
        is_causal: bool, scale: float, kernel: AttentionKernel,
    ) -> torch.Tensor:  # fmt: skip
        if kernel == "efficient":
            out, lse, *for_backward = _aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, True, 0.0, is_causal, scale=scale
            )
        elif query.device.type == "cpu":
            out, lse, *for_backward = _aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale
            )
        else:
            out, lse, *for_backward = _aten._scaled_dot_product_flash_attention(
                query, key, value, 0.0, is_causal, False, scale=scale
            )
        sink = sinks.to(lse.dtype)[:, None]
        share = torch.sigmoid(lse[..., : query.shape[2]] - sink).unsqueeze(-1)  # the efficient kernel rounds tokens up
        scaled: torch.Tensor = out.clone().mul_(share)  # the kernel's own may be kept; rounded once
        ctx.save_for_backward(query, key, value, sinks, bias, scaled, torch.logaddexp(lse, sink))
        ctx.options = is_causal, scale, kernel, for_backward
        return scaled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, bias, out, lse = ctx.saved_tensors
        is_causal, scale, kernel, for_backward = ctx.options
        given = grad, query, key, value
        if kernel == "efficient":
            gradients = _aten._scaled_dot_product_efficient_attention_backward(
                *given, bias, out, lse, *for_backward, 0.0, [True, True, True, False], is_causal, scale=scale
            )
        elif query.device.type == "cpu":
            gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *given, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale
            )
        else:
            gradients = _aten._scaled_dot_product_flash_attention_backward(
                *given, out, lse, *for_backward[:4], 0.0, is_causal, *for_backward[4:6], scale=scale
            )
        of_sinks = None
        if ctx.needs_input_grad[3]:
            weights = torch.exp(sinks.to(lse.dtype)[:, None] - lse[..., : query.shape[2]])  # what each token gives its sink
            of_sinks = -(weights * (grad.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return *gradients[:3], of_sinks, None, None, None, None


def _added(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return None if mask is None else mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    """Returns the same in memory whose rows begin where the efficient kernel can read them."""
    size = bias.shape[-1]
    return bias if size % _ALIGNED == 0 else nn.functional.pad(bias, (0, -size % _ALIGNED))[..., :size]


def _unfused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, dropout_p: float, is_causal: bool,
    scale: float, sinks: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
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


computed_with_sinks = attention_with_sinks  # what `attend_with_sinks` calls; `operators.InAttention` replaces it for a while
ALL_ATTENTION_FUNCTIONS.register(SINKS, attend_with_sinks)
ALL_MASK_ATTENTION_FUNCTIONS.register(SINKS, sdpa_mask)


# ---- which kernel -------------------------------------------------------------------------------------------------
# Names the kernel that torch uses for a model's attention, finds a fused one for latent attention, and keeps transformers from
# looking for documents in a row.

SDPA = torch.nn.functional.scaled_dot_product_attention  # torch's own: `operators.InAttention` puts another there for a while
ATTENTIONS = (SDPA, attention_with_sinks)  # they take the same arguments first
_KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # torch's numbers


def rows_are_whole() -> None:
    """Tells transformers, for this process, that a row of flash attention is one document. It looks at the values of a single
    row's positions otherwise: a copy from the device in every layer, and an error where a model is inspected without values.
    Rows that are divided are computed document by document (`attention_apart`)."""
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


# ---- lengths of rows ----------------------------------------------------------------------------------------------
# Finds at which lengths of a row a model's rotary positions change.
#
# longrope divides frequencies by other factors as soon as a row is longer than the model was trained with at first; dynamic
# stretches them by the length of a row that is longer than the model was made for. transformers goes by the longest row of a
# batch, so rows that must have positions of their own length go through the model with rows like them only.


@dataclass(frozen=True, slots=True)
class PositionChange:
    """Says that rows of more than `tokens` tokens have other positions. `growing`: others for each length from there on."""

    tokens: int
    growing: bool


def rope_types(model: PreTrainedModel) -> Iterator[str]:
    """Yields the kinds of rotary positions of a model; some have one for each type of layer."""
    for _, kind, _ in _rotary(model):
        yield kind


def turns(model: PreTrainedModel) -> list[PositionChange]:
    """Lists the lengths at which a model's positions change; shortest first."""
    changes = set()
    for module, kind, parameters in _rotary(model):
        if kind == "longrope":
            changes.add(PositionChange(parameters["original_max_position_embeddings"], growing=False))
        elif "dynamic" in kind:
            changes.add(PositionChange(module.original_max_seq_len, growing=True))
    return sorted(changes, key=lambda turn: turn.tokens)


def _rotary(model: PreTrainedModel) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """Yields (module, kind, parameters) of all rotary positions."""
    for module in model.base_model.modules():
        kind, config = getattr(module, "rope_type", None), getattr(module, "config", None)
        parameters = getattr(config, "rope_parameters", None) or {}
        if isinstance(kind, str):
            yield module, kind, parameters
        elif isinstance(kind, dict):
            yield from ((module, of_layers, parameters[layers]) for layers, of_layers in kind.items())


def alike(model: PreTrainedModel, lengths: Sequence[int], *, new: int = 0) -> list[list[int]]:
    """Groups rows, by their places in `lengths`, that have the positions of their own length in one batch, also while `new`
    tokens follow each of them. One group holds all of them for most models."""
    groups: dict[tuple[int, ...], list[int]] = {}
    changes = turns(model)

    def of(length: int, turn: PositionChange) -> int:
        if length + new <= turn.tokens:
            return 0
        return -1 if length > turn.tokens and not turn.growing else length

    for place, length in enumerate(lengths):
        groups.setdefault(tuple(of(length, turn) for turn in changes), []).append(place)
    return list(groups.values())
