"""Cuts what is too large for a slot: embedding and head along the vocabulary into stages of some rows, blocks into ranges of
their experts. Computes embeddings as look-ups of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from ..core.errors import UsageError
from ..core.units import align_up
from ..spec.model import TensorSpec, is_quantised
from .anatomy import Anatomy, Installed, Slotted, Stage
from .calls import TRIED, only_refusals, replaced_forwards, stage_calls, tracing, with_fake_parameters
from .experts import Bank, ExpertPart, Noting, Route, outputs, place
from .gradients import GradientSum
from .loss import Head
from .skeleton import LIBRARY_ERRORS


def is_lookup(module: nn.Module | None) -> TypeGuard[nn.Embedding]:
    """Whether the module is an embedding whose rows and gradients do not depend on how often each row is looked up."""
    return isinstance(module, nn.Embedding) and module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def is_plain(module: nn.Module | None) -> bool:
    """Whether the module is only a lookup, so that its gradient is a sum of rows."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and module.max_norm is None
        and not module.scale_grad_by_freq
    )


@dataclass(frozen=True, slots=True)
class LookedUpIds:
    """Describes what one micro-batch looks up in a table, or in one piece of it. All tensors but `distinct_on_host` are on the
    device."""

    places: torch.Tensor | None  # places of these ids among the micro-batch's tokens; None: all tokens
    distinct: torch.Tensor  # distinct ids in rising order
    distinct_on_host: torch.Tensor  # the same in host memory


OfMicroBatches = Sequence[Sequence[LookedUpIds]]  # indexed by micro-batch and piece


class StepIds:
    """What all micro-batches of a step look up, found on the host and placed on the device at once. `ids`: the ids in the
    form that the model's forward is given."""

    def __init__(
        self, parts: Sequence[torch.Tensor], pieces: Sequence[tuple[int, int]], place: Callable[[torch.Tensor], torch.Tensor],
        *, begins: Sequence[int],
    ) -> None:  # fmt: skip
        """Finds what is looked up. `parts`: ids of each micro-batch in host memory; `pieces`: rows (first, end) of each piece,
        empty if the table is not cut; `begins`: where each micro-batch begins among the ids that the forward is given, and
        where these end."""
        self._ids: tuple[torch.Tensor, int] | None = None  # and their version: the model's code may change them in place
        sizes = [part.numel() for part in parts]
        self._micro_batch_at = {place: number for number, place in enumerate(begins)}
        rows: Sequence[tuple[int, int] | None] = pieces or [None]
        in_rows = [[_ids_in_rows(part.reshape(-1), of_piece) for of_piece in rows] for part in parts]
        # The size does not depend on the ids, because a plan charges it.
        table = torch.zeros((2 if pieces else 1) * sum(sizes), dtype=torch.long)
        tensors, end = [tensor for part in in_rows for of_piece in part for tensor in of_piece if tensor is not None], 0
        for tensor in tensors:
            table[end : end + tensor.numel()] = tensor
            end += tensor.numel()
        self._in_rows, self._firsts = in_rows, [first for first, _ in pieces] or [0]
        placed = iter(place(table)[:end].split([tensor.numel() for tensor in tensors]))
        self.looked: OfMicroBatches = [
            [LookedUpIds(None if places is None else next(placed), next(placed), distinct) for places, distinct in part]
            for part in in_rows
        ]

    def are(self, ids: torch.Tensor) -> None:
        """Takes note of the tensor of ids that the model's forward is given."""
        self._ids = ids, ids._version

    def rows(self) -> list[torch.Tensor]:
        """Returns the distinct rows of each piece, or of the whole table, that all micro-batches look up: 1-D, in host memory,
        counted from the piece's own first row."""
        by_piece = zip(*([distinct for _, distinct in part] for part in self._in_rows), strict=True)
        return [torch.cat(pieces).unique() - first for pieces, first in zip(by_piece, self._firsts, strict=True)]

    def part(self, ids: torch.Tensor) -> OfMicroBatches | None:
        """Returns what is known of `ids`, in any shape, if they are whole micro-batches of the forward's ids, unchanged since;
        otherwise None."""
        given, version = self._ids or (ids, -1)
        if given._version != version or given.device != ids.device or not ids.is_contiguous():
            return None
        first = (ids.data_ptr() - given.data_ptr()) // given.element_size()
        begin, end = (self._micro_batch_at.get(place) for place in (first, first + ids.numel()))
        return None if begin is None or end is None else self.looked[begin:end]


def _ids_in_rows(ids: torch.Tensor, rows: tuple[int, int] | None) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Finds which ids (host memory) are in these rows, and the distinct ones among them."""
    if rows is None:
        return None, ids.unique()
    places = ((ids >= rows[0]) & (ids < rows[1])).nonzero().view(-1)
    return places, ids[places].unique()


def add_rows(
    module: nn.Embedding, run: Callable[[torch.Tensor], Any], looked: LookedUpIds, ids: torch.Tensor, grad: torch.Tensor,
    into: GradientSum, *, first: int,
) -> None:  # fmt: skip
    """Adds the gradient of one micro-batch's lookup: one row per distinct id.

    ids: (tokens,) int64, of the whole micro-batch; grad: (tokens, hidden). `first`: the id of the sum's first row.
    """
    if looked.places is not None:
        ids, grad = ids[looked.places], grad[looked.places]
    distinct, padding = looked.distinct, _place_of_padding(module, looked.distinct_on_host)
    renumbered = torch.searchsorted(distinct, ids)
    if is_plain(module):  # the kernel sums in the same order as a dense embedding backward
        size = distinct.numel()
        rows = torch.ops.aten.embedding_dense_backward(grad.contiguous(), renumbered, size, padding, False)
    else:  # a scaled lookup: through its own forward
        # Any values: the gradient does not depend on them.
        weight = torch.zeros(distinct.numel(), grad.shape[-1], dtype=module.weight.dtype, device=grad.device)
        with torch.enable_grad(), holding(module, weight, padding=None if padding < 0 else padding) as parameter:
            torch.autograd.backward([run(renumbered)], [grad], inputs=[parameter])
        assert parameter.grad is not None
        rows = parameter.grad
    into.add_rows(0, distinct - first, rows)


def _place_of_padding(module: nn.Embedding, distinct: torch.Tensor) -> int:
    """Finds the id that learns nothing among the distinct ones (host memory). Returns -1 if it is not there."""
    if module.padding_idx is None:
        return -1
    match = (distinct == module.padding_idx).nonzero()
    return int(match[0, 0]) if match.numel() else -1


def looked_up(
    module: nn.Embedding, run: Callable[[torch.Tensor], Any], ids: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Runs the module's own forward (`run`) for these ids with other weights, without gradient."""
    with torch.no_grad(), holding(module, weight, padding=None):
        y: torch.Tensor = run(ids)
    return y


def scales_rows(embedding: nn.Embedding) -> bool:
    """Whether the module's own forward gives a linear image of each id's row that does not depend on the id's number or
    its neighbours."""
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


@contextmanager
def holding(module: nn.Embedding, weight: torch.Tensor, *, padding: int | None) -> Iterator[nn.Parameter]:
    """Sets `weight` (any number of rows) as the embedding's weight inside the context, and `padding` as the id that learns
    nothing."""
    before = module._parameters["weight"]
    parameter = nn.Parameter(weight)
    module._parameters["weight"] = parameter
    try:
        with padding_at(module, padding):
            yield parameter
    finally:
        module._parameters["weight"] = before


@contextmanager
def padding_at(module: nn.Embedding, padding: int | None) -> Iterator[None]:
    """Sets `padding` inside the context as the id that learns nothing (None: no id). torch refuses one outside of a piece's
    rows."""
    before = module.padding_idx
    module.padding_idx = padding
    try:
        yield
    finally:
        module.padding_idx = before


# ---- stages of some rows ------------------------------------------------------------------------------------------
# Cuts embedding and head along the vocabulary: tells whether a model allows it, how many rows a piece has, and makes the
# resulting stages.
#
# Otherwise a large vocabulary would be two stages several times the size of a block, and every slot would be as large. What
# the model's own code does to embeddings and logits is tried on small tensors, never derived from a family's name.

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
    """Whether the model's own forward treats each column of the logits by itself. A softmax, or a mask over some columns,
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


def _rows_of(tensor: TensorSpec, begin: int, end: int) -> TensorSpec:
    """Returns some rows of a tensor, or some experts of one that holds all of them."""
    width = tensor.numel // tensor.shape[0]
    shape = (end - begin, *tensor.shape[1:])
    return replace(tensor, shape=shape, numel=(end - begin) * width, first=begin * width, whole=tensor.shape)


# ---- ranges of experts ---------------------------------------------------------------------------------------------
# Cuts blocks whose experts are too large for a slot: a block without its experts, then ranges of these as stages of their own.
#
# The block's own forward runs with zeros in place of what its experts return, and notes what it sends to them (`Sent`). Each
# range adds the weighted outputs of its experts to a sum, and the last adds the sum to what the block returned. All rows of a
# sweep pass through the block before its first range begins, so that a range's weights pass once in each visit.
#
# Exactness: a token's outputs are added one by one in the order of its experts, in float32, and the gradients of what they had
# in the reverse order, as backward visits ranges. So bits do not depend on where a block is cut. That a block adds what its
# experts return, and does nothing else with it, is tried on its own forward, never derived from a family's name.


_aten = torch.ops.aten
_CHOICE = {2: torch.int16, 4: torch.int32}  # how a choice lies among elements of so many bytes
# Operators that leave every element where it is, or add something to it.
_SAME = {_aten.view, _aten._unsafe_view, _aten.reshape, _aten.unsqueeze, _aten.squeeze, _aten.alias, _aten.detach, _aten.clone}
_SUMS = {_aten.add, _aten.add_}


# ---- what a block sends to its experts -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sent:
    """What a block sends to its experts: hidden (tokens, width); chosen, weights: (tokens, experts of a token)."""

    hidden: torch.Tensor
    chosen: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def by(cls, parameters: Installed) -> Sent:
        """Returns what the block of these parameters has just sent, and forgets it."""
        (noting,) = parameters.banks
        assert isinstance(noting, Noting)
        return cls(*noting.pop_sent())

    @classmethod
    def of(cls, packed: torch.Tensor, width: int, choices: int) -> Sent:
        """Reads what `packed` returned. `choices`: experts of a token."""
        flat, item = packed.reshape(-1, packed.shape[-1]), packed.element_size()
        hidden, chosen, weights = flat.split((width, choices, flat.shape[1] - width - choices), 1)
        dtype = packed.dtype if weights.shape[1] == choices else torch.float32
        return cls(hidden, chosen.contiguous().view(_CHOICE[item]).long(), weights.contiguous().view(dtype))

    @property
    def columns(self) -> int:
        choices, item = self.weights.shape[1], self.hidden.element_size()
        return self.hidden.shape[1] + choices + choices * self.weights.element_size() // item

    def packed(self, rows: int) -> torch.Tensor:
        """Returns all of it as one tensor in the dtype of the hidden state, (rows, tokens of a row, columns)."""
        dtype = self.hidden.dtype
        chosen = self.chosen.to(_CHOICE[dtype.itemsize]).view(dtype)
        columns = self.hidden.detach(), chosen, self.weights.detach().contiguous().view(dtype)
        return torch.cat(columns, dim=1).view(rows, self.hidden.shape[0] // rows, -1)

    def to(self, device: torch.device) -> Sent:
        return Sent(self.hidden.to(device), self.chosen.to(device), self.weights.to(device))

    def roots(self, sums: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns where the block's backward begins beside its output. `sums`: of `differentiate`, for its tokens."""
        of_hidden, of_weights = sums.reshape(len(self.hidden), -1).split((self.hidden.shape[1], self.weights.shape[1]), 1)
        roots = ((self.hidden, of_hidden), (self.weights, of_weights))
        return [(root, gradient.to(root.dtype)) for root, gradient in roots if root.requires_grad]


# ---- a range -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpertRows:
    expert: int  # within its range
    tokens: torch.Tensor
    places: torch.Tensor  # among the choices of each token
    route: Route  # that sends all of them to it

    @classmethod
    def by_expert(cls, chosen: torch.Tensor, begin: int, end: int, experts: int) -> Iterator[ExpertRows]:
        """Yields the rows of the experts from `begin` to `end` that have some, of `experts`. On fake tensors all tokens go to
        one of them: more memory no routing takes."""
        route, number = Route.of(chosen, experts), end - begin
        if isinstance(chosen, FakeTensor):
            order = route.order[: len(chosen)]
            yield cls(0, order, order, replace(route, counts=()))
            return
        first = sum(route.counts[:begin])
        for expert, count in enumerate(route.counts[begin:end]):
            if count:
                order = route.order[first : first + count]
                counts = [count if other == expert else 0 for other in range(number)]
                yield cls(expert, order // chosen.shape[1], order % chosen.shape[1], replace(route, counts=counts))
            first += count


def _bank(parameters: Installed) -> Bank:
    (bank,) = parameters.banks
    assert isinstance(bank, Bank)
    return bank


def add_outputs(
    stage: Stage, parameters: Installed, sent: Sent, sums: torch.Tensor, inside: Callable[[], object] = lambda: None
) -> None:  # fmt: skip
    """Adds the weighted outputs of a range's experts. sums: (tokens, width) float32. Calls `inside` after each expert."""
    assert stage.expert_range is not None and stage.module is not None
    bank = _bank(parameters)
    for rows in ExpertRows.by_expert(sent.chosen, *stage.expert_range):
        shares = sent.weights[rows.tokens, rows.places].unsqueeze(1)
        weighted = outputs(stage.module, bank, partial(sent.hidden.index_select, 0, rows.tokens), shares, rows.route)
        sums.index_add_(0, rows.tokens, weighted.to(sums.dtype))  # no token twice
        inside()


def differentiate(
    stage: Stage, parameters: Installed, sent: Sent, grad: torch.Tensor, sums: torch.Tensor | None,
    inside: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Differentiates what a range adds. grad: (tokens, width), of the block's output. Adds the gradients of the hidden state
    and, behind them, of the weights to `sums`, (tokens, width and experts of a token) float32; None: nobody wants them. Calls
    `inside` after each expert."""
    assert stage.expert_range is not None and stage.module is not None
    bank, width, wanted = _bank(parameters), sent.hidden.shape[1], sums is not None
    for rows in reversed(list(ExpertRows.by_expert(sent.chosen, *stage.expert_range))):  # as ranges are visited
        x = sent.hidden.index_select(0, rows.tokens).requires_grad_(wanted)
        shares = sent.weights[rows.tokens, rows.places].unsqueeze(1).requires_grad_(wanted)
        with torch.enable_grad():
            weighted = outputs(stage.module, bank, [x].pop, shares, rows.route)
        leaves = [leaf for leaf in (x, shares, bank.anchor) if leaf is not None and leaf.requires_grad]
        if not leaves:
            return
        torch.autograd.backward([weighted], [grad.index_select(0, rows.tokens).to(weighted.dtype)], inputs=leaves)
        if sums is not None:
            assert x.grad is not None and shares.grad is not None
            sums[:, :width].index_add_(0, rows.tokens, x.grad.to(sums.dtype))
            sums[rows.tokens, width + rows.places] = shares.grad.squeeze(1).to(sums.dtype)
        inside()


# ---- whether -------------------------------------------------------------------------------------------------------------


class _Added(TorchDispatchMode):
    """Follows zeros through a forward. `misused`: the first operator that does more with them than add them to something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.zeros: list[torch.Tensor] = []  # and what was made of them
        self.misused = ""

    def made_of(self, value: object) -> bool:
        return any(value is zeros for zeros in self.zeros)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        used = [place for place, leaf in enumerate(args) if any(map(self.made_of, tree_leaves(leaf)))]
        if func.namespace == "prim" or (not used and not any(map(self.made_of, tree_leaves(kwargs)))):
            return out
        operator, plain = func.overloadpacket, not (kwargs or {}) or func.overloadpacket is _aten.clone
        adds = operator in _SUMS and len(used) == 1 and plain and args[1 - used[0]].shape == args[used[0]].shape == out.shape
        if not adds and not (operator in _SAME and used == [0] and plain):
            self.misused = self.misused or str(operator)
        self.zeros += [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        return out


class _Followed(Noting):
    def __init__(self, experts: int, added: _Added) -> None:
        super().__init__(experts)
        self._added = added

    def note(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        zeros = super().note(hidden, chosen, weights)
        self._added.zeros.append(zeros)
        return zeros


def obstacles(anatomy: Anatomy) -> dict[str, str]:
    """Returns, by block with routed experts, why these cannot be stages of their own; empty if they can."""
    mixtures = {stage.name: stage for stage in anatomy.stages if stage.kind == "block" and stage.experts}
    reasons = {name: _by_tensors(stage) for name, stage in mixtures.items()}
    seen: dict[object, str] = {}
    with only_refusals(anatomy.model, shape=TRIED):
        for call, x in stage_calls(anatomy.model, anatomy.modules(), shape=TRIED, isolated=anatomy.isolated):
            stage = mixtures.get(call.name)
            if stage is None or reasons[call.name]:
                continue
            assert stage.module is not None and hasattr(x, "fake_mode")
            sort = type(stage.module), tuple((name, type(part)) for name, part in stage.module.named_modules())
            if sort not in seen:
                traced = tracing(stage.module, mode=x.fake_mode, length=x.shape[1])
                with traced, torch.no_grad(), with_fake_parameters(stage.module):
                    seen[sort] = _by_forward(stage, call.run, x)
            reasons[call.name] = seen[sort]
    return reasons


def _by_tensors(stage: Stage) -> str:
    if len(stage.experts) != 1:
        return "it has several mixtures"
    ((module, _),) = stage.experts
    routed = {slotted.places[0] for slotted in stage.parameters if slotted.spec.routed}
    if any((module, name) not in routed for name, _ in module.named_parameters()):
        return "its experts have parameters beside their matrices"
    if any(slotted.spec.routed and slotted.part is None and slotted.spec.quantised for slotted in stage.parameters):
        return "one quantised tensor holds the matrices of all experts"
    return ""


def _by_forward(stage: Stage, run: Any, x: torch.Tensor) -> str:
    ((module, products),) = stage.experts
    added = _Added()
    noting = _Followed(next(iter(products.values())).experts, added)
    place(module, noting)
    try:
        with added:
            y = run(x)
        sent = Sent(*noting.pop_sent())
    finally:
        place(module, None)
    if added.misused or not added.made_of(y):
        return f"it does more with what its experts return than add it ({added.misused or 'its output'})"
    if sent.hidden.shape[0] != x.shape[0] * x.shape[1] or sent.hidden.dtype != x.dtype or sent.hidden.shape[1] != y.shape[-1]:
        return "its experts do not take one row of its own width for each token"
    if sent.weights.dtype not in (x.dtype, torch.float32):
        return f"the weights of its experts are {sent.weights.dtype}"
    return ""


# ---- cutting -------------------------------------------------------------------------------------------------------------


def cut_experts(anatomy: Anatomy, size: int) -> Anatomy:
    """Cuts every block with routed experts that can be, into a stage without them and ranges of at most `size`. With 0 it
    changes nothing."""
    if not size:
        return anatomy
    reasons = obstacles(anatomy)
    stages = [part for stage in anatomy.stages for part in (_cut(stage, size) if reasons.get(stage.name) == "" else (stage,))]
    return replace(anatomy, stages=tuple(stages))


def _cut(stage: Stage, size: int) -> Iterator[Stage]:
    ((module, products),) = stage.experts
    experts = next(iter(products.values())).experts
    storage = None if stage.quantised is None or not is_quantised(stage.quantised.storage) else stage.quantised.storage
    kept = [slotted for slotted in stage.parameters if not slotted.spec.routed]
    yield replace(Stage.packed(stage.name, stage.kind, stage.module, kept, quantisation=storage), cut=(module, experts))
    routed = [slotted for slotted in stage.parameters if slotted.spec.routed]
    name = next(name for name, part in stage.module.named_modules() if part is module) if stage.module is not None else ""
    for begin in range(0, experts, size):
        end = min(begin + size, experts)
        some = Stage.packed(
            f"{stage.name}.{name}[{begin}:{end}]", stage.kind, module, _of_range(routed, begin, end), quantisation=storage
        )
        yield replace(some, expert_range=(begin, end, experts))


def _of_range(routed: Sequence[Slotted], begin: int, end: int) -> Iterator[Slotted]:
    for slotted in routed:
        if slotted.part is None:
            yield replace(slotted, spec=_rows_of(slotted.spec, begin, end))
        elif begin <= slotted.part.expert < end:
            yield replace(slotted, part=ExpertPart(slotted.part.expert - begin, slotted.part.part))
