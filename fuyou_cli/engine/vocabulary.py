"""Cuts embedding and head along the vocabulary: tells whether a model allows it, how many rows a piece has, and makes the
resulting stages.

Otherwise a large vocabulary would be two stages several times the size of a block, and every slot would be as large. What the
model's own code does to embeddings and logits is tried on small tensors, never derived from a family's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from ..core.errors import UsageError
from ..core.units import align_up
from ..spec.model import TensorSpec
from .anatomy import Anatomy, Slotted, Stage
from .calls import replaced_forwards
from .lookup import is_lookup, scales_rows
from .loss import Head
from .skeleton import LIBRARY_ERRORS

AUTO_ABOVE = 1 << 27  # elements of a vocabulary tensor; `auto` leaves smaller ones whole
AUTO_PIECE = 1 << 26  # elements of a piece at most, about a block of a model of 1 B parameters
ROW_ALIGN = 64
MOST_PIECES = 256
_INDEPENDENT: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()  # found once: it takes half a second


def automatic_rows(vocabulary: int, width: int) -> int:
    """Chooses the rows of a piece from the shape: 0 (whole) up to 2**27 elements, otherwise equal pieces of at most 2**26."""
    if vocabulary * width <= AUTO_ABOVE:
        return 0
    most = max(ROW_ALIGN, AUTO_PIECE // width // ROW_ALIGN * ROW_ALIGN)
    count = -(-vocabulary // most)
    return align_up(-(-vocabulary // count), ROW_ALIGN)


def resolved_rows(anatomy: Anatomy, asked: int | Literal["auto"]) -> int:
    """Chooses the rows of a piece, 0 for none. Raises UsageError for a number that the model does not allow."""
    vocabulary, width = _largest(anatomy)
    rows = automatic_rows(vocabulary, width) if asked == "auto" else asked
    if rows == 0:
        return 0
    reason = obstacle(anatomy)
    if asked == "auto":
        return rows if reason is None else 0
    if reason is not None:
        raise UsageError(
            f"train.head_chunk_vocab: {type(anatomy.model).__name__} cannot be cut along its vocabulary: {reason}",
            hint="leave train.head_chunk_vocab at auto, which keeps such a model whole",
        )
    if vocabulary > rows * MOST_PIECES:
        raise UsageError(
            f"train.head_chunk_vocab: {vocabulary} tokens in pieces of {rows} are more than {MOST_PIECES} pieces",
            hint=f"give at least {-(-vocabulary // MOST_PIECES)}",
        )
    return rows


def _largest(anatomy: Anatomy) -> tuple[int, int]:
    """Returns (rows, width) of the larger of embedding and head; (0, 0) if neither is a matrix."""
    ends = (anatomy.model.get_input_embeddings(), anatomy.model.get_output_embeddings())
    weights = [weight for end in ends if isinstance(weight := getattr(end, "weight", None), torch.Tensor)]
    shapes = [(int(weight.shape[0]), int(weight.shape[1])) for weight in weights if weight.dim() == 2]
    return max(shapes, key=lambda shape: shape[0] * shape[1], default=(0, 0))


# ---- whether ---------------------------------------------------------------------------------------------------------


def obstacle(anatomy: Anatomy) -> str | None:
    """Returns why embedding and head cannot be computed by pieces of their rows, or None if they can."""
    embedding, head = anatomy.model.get_input_embeddings(), anatomy.model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return "its head is not a plain linear layer"
    if not is_lookup(embedding):
        return "its embedding is not a plain lookup"
    of_embedding = next((stage.parameters for stage in anatomy.stages if stage.module is embedding), None)
    if of_embedding is None:
        return "its embedding is not a stage of its own"
    of_head = anatomy.stages[-1].parameters
    readers = {(embedding, "weight"), *([(head, "weight")] if anatomy.tied_head else [])}
    if [set(slotted.places) for slotted in of_embedding] != [readers]:
        return "its embedding's weights have other users"
    expected = [] if anatomy.tied_head else [{(head, name)} for name, _ in head.named_parameters()]
    if [set(slotted.places) for slotted in of_head] != expected or (anatomy.tied_head and head.bias is not None):
        return "its head owns more than a linear layer's weights"
    if not scales_rows(embedding):
        return "its embedding does more to a row than scale it"
    if not _logits_are_independent(anatomy.model, head):
        return "its logits depend on each other after the linear layer"
    return None


def _logits_are_independent(model: PreTrainedModel, head: nn.Linear) -> bool:
    """Tells whether the model's own forward treats each column of the logits by itself. A softmax, or a mask over some columns,
    does not."""
    if model not in _INDEPENDENT:
        _INDEPENDENT[model] = _are_independent(model, head)
    return _INDEPENDENT[model]


def _are_independent(model: PreTrainedModel, head: nn.Linear) -> bool:
    vocabulary = head.out_features
    logits = torch.arange(2.0 * vocabulary).sin().view(1, 2, vocabulary) * torch.linspace(5, 60, vocabulary)
    hidden = torch.zeros(1, 2, head.in_features, dtype=head.weight.dtype)
    stubbed = Head(model)

    def transformed(columns: slice) -> torch.Tensor:
        def some_columns(*args: object, **kwargs: object) -> torch.Tensor:
            return logits[..., columns].clone()

        with torch.no_grad(), stubbed.stubbed(), replaced_forwards({head: some_columns}):
            return stubbed.logits(hidden)

    try:
        whole = transformed(slice(0, vocabulary))
        columns = [slice(a, b) for a, b in pairwise((0, vocabulary // 3, vocabulary // 2, vocabulary))]
        return all(torch.allclose(transformed(c), whole[..., c], rtol=1e-5, atol=1e-6) for c in columns)
    except LIBRARY_ERRORS:
        return False


# ---- cutting ---------------------------------------------------------------------------------------------------------


def cut_vocabulary(anatomy: Anatomy, rows: int) -> Anatomy:
    """Cuts embedding and head of a model without obstacle into stages of at most `rows` rows each. With 0 it changes
    nothing."""
    if rows == 0:
        return anatomy
    embedding, head = anatomy.model.get_input_embeddings(), anatomy.model.get_output_embeddings()
    assert isinstance(embedding, nn.Embedding)
    stages: list[Stage] = []
    for stage in anatomy.stages:
        if stage.module is embedding:
            stages += _pieces(stage, embedding.num_embeddings, rows)
        elif stage.kind == "head":
            stages += _pieces(stage, head.out_features, rows)
        else:
            stages.append(stage)
    return replace(anatomy, stages=tuple(stages))


def _pieces(stage: Stage, vocabulary: int, rows: int) -> Iterator[Stage]:
    for begin in range(0, vocabulary, rows):
        end = min(begin + rows, vocabulary)
        parameters = (Slotted(_rows_of(slotted.spec, begin, end), slotted.places) for slotted in stage.parameters)
        yield Stage.packed(f"{stage.name}[{begin}:{end}]", stage.kind, stage.module, parameters, (begin, end))


def _rows_of(whole: TensorSpec, begin: int, end: int) -> TensorSpec:
    width = whole.numel // whole.shape[0]
    shape = (end - begin, *whole.shape[1:])
    return replace(whole, shape=shape, numel=(end - begin) * width, first=begin * width, whole=whole.shape)
