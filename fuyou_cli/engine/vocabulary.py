"""Cutting embedding and head along the vocabulary: whether a model allows it, how many rows a piece has, and the stages
that come of it.

A large vocabulary would otherwise be two stages several times the size of a block, and every slot as large as they are.
What the model's own code does to embeddings and logits is tried on small tensors, never known by a family's name.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Literal

import torch
from torch import nn

from ..core.errors import UsageError
from ..core.units import align_up
from ..spec.model import STAGE_ALIGN, TENSOR_ALIGN
from .anatomy import Anatomy, Slotted
from .calls import replaced_forwards
from .embedding import is_lookup, looked_up
from .head import Head
from .skeleton import LIBRARY_ERRORS

AUTO_ABOVE = 1 << 27  # elements of a vocabulary tensor: `auto` leaves smaller ones whole
AUTO_PIECE = 1 << 26  # elements of a piece at most: about a block of a model of 1 B parameters
ROW_ALIGN = 64
MOST_PIECES = 256


def automatic_rows(vocabulary: int, width: int) -> int:
    """Rows of a piece by a fixed rule of the shape: 0 (whole) up to 2**27 elements, else equal pieces of at most 2**26."""
    if vocabulary * width <= AUTO_ABOVE:
        return 0
    most = max(ROW_ALIGN, AUTO_PIECE // width // ROW_ALIGN * ROW_ALIGN)
    count = -(-vocabulary // most)
    return align_up(-(-vocabulary // count), ROW_ALIGN)


def resolved_rows(anatomy: Anatomy, asked: int | Literal["auto"]) -> int:
    """Rows of a piece for this model, 0 where it is not to be cut. Raises UsageError when a number was asked for and the
    model does not allow it."""
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
    """(rows, width) of the larger of embedding and head; (0, 0) where neither is a matrix."""
    ends = (anatomy.model.get_input_embeddings(), anatomy.model.get_output_embeddings())
    weights = [weight for end in ends if isinstance(weight := getattr(end, "weight", None), torch.Tensor)]
    shapes = [(int(weight.shape[0]), int(weight.shape[1])) for weight in weights if weight.dim() == 2]
    return max(shapes, key=lambda shape: shape[0] * shape[1], default=(0, 0))


# ---- whether ---------------------------------------------------------------------------------------------------------


def obstacle(anatomy: Anatomy) -> str | None:
    """Why embedding and head cannot be computed by pieces of their rows; None when they can."""
    embedding, head = anatomy.model.get_input_embeddings(), anatomy.model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return "its head is not a plain linear layer"
    if not is_lookup(embedding):
        return "its embedding is not a plain lookup"
    if embedding not in anatomy.modules:
        return "its embedding is not a stage of its own"
    of_embedding = anatomy.parameters[anatomy.modules.index(embedding)]
    of_head = anatomy.parameters[-1]
    readers = {(embedding, "weight"), *([(head, "weight")] if anatomy.tied_head else [])}
    if [set(slotted.places) for slotted in of_embedding] != [readers]:
        return "its embedding's weights have other users"
    expected = [] if anatomy.tied_head else [{(head, name)} for name, _ in head.named_parameters()]
    if [set(slotted.places) for slotted in of_head] != expected or (anatomy.tied_head and head.bias is not None):
        return "its head owns more than a linear layer's weights"
    if not scales_rows(embedding):
        return "its embedding does more to a row than scale it"
    if not _logits_are_independent(anatomy, head):
        return "its logits depend on each other after the linear layer"
    return None


def scales_rows(embedding: nn.Embedding) -> bool:
    """Whether the module's own forward gives a linear image of each id's row, whatever the id's number and neighbours."""
    if type(embedding).forward is nn.Embedding.forward:
        return True
    rows = torch.arange(1.0, 1.0 + 6 * embedding.embedding_dim).view(6, embedding.embedding_dim).sin()
    rows = rows.to(embedding.weight.dtype)
    last = embedding.num_embeddings - 1
    try:
        whole = looked_up(embedding, embedding.forward, torch.arange(6), rows)
        part = looked_up(embedding, embedding.forward, torch.tensor([2, 0, 1]), rows[3:])
        doubled = looked_up(embedding, embedding.forward, torch.arange(6), -2 * rows)
        ends = looked_up(embedding, embedding.forward, torch.tensor([[0], [last]]), rows[:1].expand(last + 1, -1))
    except LIBRARY_ERRORS:
        return False
    return (
        whole.shape == rows.shape
        and torch.equal(whole[[5, 3, 4]], part)
        and torch.equal(doubled, -2 * whole)
        and torch.equal(ends, whole[:1].expand(2, 1, -1))
    )


def _logits_are_independent(anatomy: Anatomy, head: nn.Linear) -> bool:
    """Whether what the model's own forward makes of some columns of the logits is the same columns of what it makes of
    all: scaling and soft-capping are, a softmax or a mask of some columns is not."""
    model, vocabulary = anatomy.model, head.out_features
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
    """The same model with embedding and head as stages of at most `rows` rows each; unchanged when `rows` is 0. The model
    has no obstacle."""
    if rows == 0:
        return anatomy
    embedding = anatomy.modules.index(anatomy.model.get_input_embeddings())
    head = len(anatomy.kinds) - 1
    vocabulary = anatomy.model.get_output_embeddings().out_features
    cut = Anatomy(model=anatomy.model, tied_head=anatomy.tied_head)
    for index in range(len(anatomy.kinds)):
        if index == embedding:
            _add_pieces(cut, anatomy, index, anatomy.model.get_input_embeddings().num_embeddings, rows)
        elif index == head:
            _add_pieces(cut, anatomy, index, vocabulary, rows)
        else:
            _add(cut, anatomy, index, anatomy.names[index], anatomy.parameters[index], anatomy.params[index], None)
    return cut


def _add_pieces(cut: Anatomy, anatomy: Anatomy, index: int, vocabulary: int, rows: int) -> None:
    for begin in range(0, vocabulary, rows):
        end = min(begin + rows, vocabulary)
        parameters, offset = [], 0
        for slotted in anatomy.parameters[index]:
            piece = _rows_of(slotted, begin, end, offset)
            parameters.append(piece)
            offset = align_up(offset + piece.spec.numel, TENSOR_ALIGN)
        name = f"{anatomy.names[index]}[{begin}:{end}]"
        _add(cut, anatomy, index, name, tuple(parameters), align_up(offset, STAGE_ALIGN), (begin, end))


def _rows_of(slotted: Slotted, begin: int, end: int, offset: int) -> Slotted:
    whole = slotted.spec
    width = whole.numel // whole.shape[0]
    return Slotted(
        replace(
            whole,
            shape=(end - begin, *whole.shape[1:]),
            offset=offset,
            numel=(end - begin) * width,
            first=begin * width,
            whole=whole.shape,
        ),
        slotted.places,
    )


def _add(
    cut: Anatomy,
    anatomy: Anatomy,
    index: int,
    name: str,
    parameters: tuple[Slotted, ...],
    params: int,
    vocabulary: tuple[int, int] | None,
) -> None:
    cut.names.append(name)
    cut.kinds.append(anatomy.kinds[index])
    cut.modules.append(anatomy.modules[index])
    cut.parameters.append(parameters)
    cut.params.append(params)
    cut.vocabulary.append(vocabulary)
