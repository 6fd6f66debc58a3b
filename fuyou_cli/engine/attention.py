"""Keeps the documents of a row apart (`dataset.packing: isolated`), and chooses the kernel of a model's attention.

Positions begin anew in each document, and the model's own attention function is called for one document after the other. So
each is computed as in a row of its own, and no mask or score is as large as a row times a row. All of it is one operator to
whatever counts operators, so a plan does not depend on how many documents there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..core.errors import UsageError
from ..spec.plan import rounded_up
from .sinks import attention_with_sinks, kernel_of

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
    found: torch.Tensor = attend(module, *qkv, None if mask is None else mask[..., :length, :length], **options)[0]
    return found[:, :size]


def attention_apart(
    attend: Callable[..., Any], documents: Documents, module: Any, query: torch.Tensor, *others: Any, **options: Any
) -> Any:
    """Runs `by_document` as one function for torch: a mode sees one call, however many documents there are."""
    if has_torch_function((query,)):
        return handle_torch_function(attention_apart, (query,), attend, documents, module, query, *others, **options)
    return by_document(attend, documents, module, query, *others, **options)


def by_document(
    attend: Callable[..., Any],
    documents: Documents,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Returns what an attention function of transformers returns, (rows, tokens, heads, size) and no weights.

    attend: `attended` of a model's own function. query, key, value: (rows, heads, tokens, size). attention_mask: of one row
    at least as long as the longest document is computed in.
    """
    options.pop("position_ids", None)  # flash attention would look for documents in them
    rows = zip(documents, *(tensor.split(1) for tensor in (query, key, value)), strict=True)
    found = []
    for lengths, *row in rows:
        for one in zip(*(tensor.split(list(lengths), dim=2) for tensor in row), strict=True):
            found.append(attend(module, *one, attention_mask, **options))
    together = torch.cat(found, dim=1)
    return together.view(query.shape[0], query.shape[2], *together.shape[2:]), None


def laid_out(named: dict[str, Any], documents: Documents) -> dict[str, Any]:
    """Returns a block's arguments with positions that begin anew in each document. Of one row, they become one for each row."""

    def among(value: torch.Tensor) -> torch.Tensor:
        parts = torch.cat([value[:, :size] for lengths in documents for size in lengths], dim=1)
        return parts.view(len(documents), -1, *value.shape[2:])

    return named | {key: tree_map_only(torch.Tensor, among, named[key]) for key in _BY_POSITION if key in named}


def check_arguments(name: str, rest: tuple[Any, ...], named: dict[str, Any], tokens: int) -> None:
    """Raises UsageError for a tensor that a block gets beside its input, and that may depend on positions in a way not known
    here."""
    for key, given in (*named.items(), ("an argument without a name", rest)):
        for value in tree_leaves(given):
            by_position = key in _BY_POSITION and isinstance(value, torch.Tensor) and tuple(value.shape[:2]) == (1, tokens)
            if isinstance(value, torch.Tensor) and key not in _OTHERS and not by_position:
                raise UsageError(f"{name} takes {key}, a tensor of shape {tuple(value.shape)}, which cannot be cut by document")


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
