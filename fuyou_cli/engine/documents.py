"""Keeps the documents of a row apart (`dataset.packing: isolated`).

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
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..core.errors import UsageError

Documents = Sequence[Sequence[int]]  # for each row, the tokens of its documents. They fill the row: padding is the last one.

_BY_POSITION = ("position_embeddings", "position_ids")  # a block's arguments with a value for each position
_OTHERS = ("attention_mask", "cache_position")  # a mask is cut where attention is computed; the other is not read


def longest(documents: Documents) -> int:
    """Returns the tokens of the longest document."""
    return max(max(lengths) for lengths in documents)


@contextmanager
def attending_apart(documents: Documents) -> Iterator[None]:
    """Makes every attention function that a model asks transformers for inside the context compute document by document."""
    choose = ALL_ATTENTION_FUNCTIONS.get_interface

    def chosen(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return partial(attention_apart, choose(name, default), documents)

    ALL_ATTENTION_FUNCTIONS.get_interface = chosen
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS.__dict__["get_interface"]


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

    query, key, value: (rows, heads, tokens, size). attention_mask: of one row at least as long as the longest document.
    """
    options.pop("position_ids", None)  # flash attention would look for documents in them
    rows = zip(documents, *(tensor.split(1) for tensor in (query, key, value)), strict=True)
    attended = []
    for lengths, *row in rows:
        for one in zip(*(tensor.split(list(lengths), dim=2) for tensor in row), strict=True):
            size = one[0].shape[2]
            mask = None if attention_mask is None else attention_mask[..., :size, :size]
            attended.append(attend(module, *one, mask, **options)[0])
    together = torch.cat(attended, dim=1)
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
