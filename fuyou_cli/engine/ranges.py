"""Cuts blocks whose experts are too large for a slot: a block without its experts, then ranges of these as stages of their own.

The block's own forward runs with zeros in place of what its experts return, and notes what it sends to them (`Sent`). Each
range adds the weighted outputs of its experts to a sum, and the last adds the sum to what the block returned. All rows of a
sweep pass through the block before its first range begins, so that a range's weights pass once in each visit.

Exactness: a token's outputs are added one by one in the order of its experts, in float32, and the gradients of what they had in
the reverse order, as backward visits ranges. So bits do not depend on where a block is cut. That a block adds what its experts
return, and does nothing else with it, is tried on its own forward, never derived from a family's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..spec.model import TensorSpec, is_quantised
from .anatomy import Anatomy, Slotted, Stage
from .calls import TRIED, only_refusals, stage_calls, with_fake_parameters
from .experts import Bank, Noting, Part, Route, outputs, place
from .module_state import tracing

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
    def by(cls, noting: Noting) -> Sent:
        """Returns what the block has just sent."""
        return cls(*noting.taken())

    @classmethod
    def of(cls, packed: torch.Tensor, width: int, each: int) -> Sent:
        """Reads what `packed` returned. `each`: experts of a token."""
        flat, item = packed.reshape(-1, packed.shape[-1]), packed.element_size()
        hidden, chosen, weights = flat.split((width, each, flat.shape[1] - width - each), 1)
        dtype = packed.dtype if weights.shape[1] == each else torch.float32
        return cls(hidden, chosen.contiguous().view(_CHOICE[item]).long(), weights.contiguous().view(dtype))

    @property
    def columns(self) -> int:
        """Counts the columns of what `packed` returns."""
        each, item = self.weights.shape[1], self.hidden.element_size()
        return self.hidden.shape[1] + each + each * self.weights.element_size() // item

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
class Rows:
    """Says which rows one expert has."""

    expert: int  # within its range
    tokens: torch.Tensor
    places: torch.Tensor  # among the choices of each token
    route: Route  # that sends all of them to it

    @classmethod
    def each(cls, chosen: torch.Tensor, begin: int, end: int, experts: int) -> Iterator[Rows]:
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


def add_outputs(
    stage: Stage, bank: Bank, sent: Sent, sums: torch.Tensor, inside: Callable[[], object] = lambda: None
) -> None:  # fmt: skip
    """Adds the weighted outputs of a range's experts. sums: (tokens, width) float32. Calls `inside` after each expert."""
    assert stage.expert_range is not None and stage.module is not None
    for rows in Rows.each(sent.chosen, *stage.expert_range):
        shares = sent.weights[rows.tokens, rows.places].unsqueeze(1)
        found = outputs(stage.module, bank, sent.hidden.index_select(0, rows.tokens), shares, rows.route)
        sums.index_add_(0, rows.tokens, found.to(sums.dtype))  # no token twice
        inside()


def differentiate(
    stage: Stage, bank: Bank, sent: Sent, grad: torch.Tensor, sums: torch.Tensor | None,
    inside: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Differentiates what a range adds. grad: (tokens, width), of the block's output. Adds the gradients of the hidden state
    and, behind them, of the weights to `sums`, (tokens, width and experts of a token) float32; None: nobody wants them. Calls
    `inside` after each expert."""
    assert stage.expert_range is not None and stage.module is not None
    width, wanted = sent.hidden.shape[1], sums is not None
    for rows in reversed(list(Rows.each(sent.chosen, *stage.expert_range))):  # as ranges are visited
        x = sent.hidden.index_select(0, rows.tokens).requires_grad_(wanted)
        shares = sent.weights[rows.tokens, rows.places].unsqueeze(1).requires_grad_(wanted)
        with torch.enable_grad():
            found = outputs(stage.module, bank, x, shares, rows.route)
        leaves = [leaf for leaf in (x, shares, bank.anchor) if leaf is not None and leaf.requires_grad]
        if not leaves:
            return
        torch.autograd.backward([found], [grad.index_select(0, rows.tokens).to(found.dtype)], inputs=leaves)
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
    """Tells which zeros it returned."""

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
    found = {name: _by_tensors(stage) for name, stage in mixtures.items()}
    seen: dict[object, str] = {}
    with only_refusals(anatomy.model, shape=TRIED):
        for call, x in stage_calls(anatomy.model, anatomy.modules(), shape=TRIED, isolated=anatomy.isolated):
            stage = mixtures.get(call.name)
            if stage is None or found[call.name]:
                continue
            assert stage.module is not None and hasattr(x, "fake_mode")
            sort = type(stage.module), tuple((name, type(part)) for name, part in stage.module.named_modules())
            if sort not in seen:
                traced = tracing(stage.module, mode=x.fake_mode, length=x.shape[1])
                with traced, torch.no_grad(), with_fake_parameters(stage.module):
                    seen[sort] = _by_forward(stage, call.run, x)
            found[call.name] = seen[sort]
    return found


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
        sent = Sent.by(noting)
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
            yield replace(slotted, part=Part(slotted.part.expert - begin, slotted.part.part))


def _rows_of(whole: TensorSpec, begin: int, end: int) -> TensorSpec:
    """Returns the experts from `begin` to `end` of a tensor that holds all of them."""
    each = whole.numel // whole.shape[0]
    shape = (end - begin, *whole.shape[1:])
    return replace(whole, shape=shape, numel=(end - begin) * each, first=begin * each, whole=whole.shape)
