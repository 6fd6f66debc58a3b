"""Keeps the graph of a compiled block on the device from forward to backward, so that backward does not run the forward again.

A graph holds the tensors that autograd saved. It does not hold those that lie in the block's input or weights: their memory is
given to others after the visit, and backward has them again, maybe elsewhere. To these it refers by their place. All others
stay where compute put them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from ...core.units import align_up
from ...planner.boundary_layout import DEVICE_ALIGN
from .recompute import Run


@dataclass(frozen=True, slots=True)
class _Reference:
    """Describes a tensor in memory that a visit brings: of its input (0) or of a parameter (from 1 on). `offset`: in elements,
    from where that one begins."""

    number: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class _Saved:
    """Packs what autograd saves. `size`: bytes that a graph holds, as a device's allocator rounds them. `others`: storages that
    other graphs hold, which are not counted again."""

    def __init__(self, others: Set[int] = frozenset()) -> None:
        self.size = 0
        self.held = set[int]()  # storages that the graph holds, so that no other gets their address
        self._others = others
        self._brought: list[torch.Tensor] = []  # by a visit that is under way
        self._first: dict[int, int] = {}  # by storage: the first of them that lies in it

    def enter(self, x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
        """Begins a visit that brings these."""
        self._brought, self._first = [x, *parameters], {}
        for number, tensor in enumerate(self._brought):
            self._first.setdefault(tensor.untyped_storage()._cdata, number)

    def leave(self) -> None:
        self._brought, self._first = [], {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Reference:
        storage = tensor.untyped_storage()
        number = self._first.get(storage._cdata)
        if number is not None and tensor.dtype == self._brought[number].dtype:
            begin = int(self._brought[number].storage_offset())
            return _Reference(number, int(tensor.storage_offset()) - begin, tensor.shape, tensor.stride())
        if storage._cdata not in self.held and storage._cdata not in self._others:
            self.held.add(storage._cdata)
            self.size += align_up(storage.nbytes(), DEVICE_ALIGN)
        return tensor

    def unpack(self, packed: torch.Tensor | _Reference) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        brought = self._brought[packed.number].detach()
        return brought.as_strided(packed.shape, packed.stride, int(brought.storage_offset()) + packed.offset)


class _Entering(torch.autograd.Function):
    """Lets a gradient arrive at an input. A leaf would hold its memory. `anchor` requires a gradient, so the input does."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        return None, None


@dataclass(slots=True)
class _Graph:
    """Holds the graph of one micro-batch by its ends: its output (`shape`), its input, and its parameters."""

    saved: _Saved
    shape: torch.Size
    output: GradientEdge
    inputs: list[GradientEdge | None]  # None: learns nothing
    waits: bool  # for the second of two backwards


class _GoingOn(torch.autograd.Function):
    """Goes on with backward in a graph that was kept, at the end of a visit that brings input and weights."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.graph, ctx.brought = graph, (x, parameters)
        return x.new_empty(()).expand(graph.shape)  # nobody reads the output's values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (graph, brought), ctx.graph, ctx.brought = (ctx.graph, ctx.brought), None, None
        wanted = [edge for edge in graph.inputs if edge is not None]
        graph.saved.enter(*brought)
        found = iter(torch.autograd.grad([graph.output], wanted, [gradient], allow_unused=True))
        graph.saved.leave()
        return None, *(None if edge is None else next(found) for edge in graph.inputs)


def graph_bytes(run: Run, x: torch.Tensor, parameters: Sequence[nn.Parameter]) -> int:
    """Runs a block's forward and returns the bytes that its graph holds."""
    saved = _Saved()
    with torch.enable_grad():
        leaf = x.detach().requires_grad_(True)
        saved.enter(leaf, parameters)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            run(leaf)
    return saved.size


class KeptGraphs:
    """Implements `Activations` for a compiled block that keeps its graphs, one per micro-batch, within `size` bytes. They share
    what is the same for all rows, like masks. `twice`: two backwards follow a forward. The first runs the forward again,
    because a compiled backward may write into what its graph saved. `too_large` gets the bytes of a graph that is not kept, and
    those that are left for it."""

    def __init__(self, size: int, *, twice: bool, too_large: Callable[[int, int], None]) -> None:
        self._size, self._twice, self._too_large = size, twice, too_large
        self._graphs: dict[int, _Graph] = {}  # by micro-batch
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(self, run: Run, x: torch.Tensor, micro_batch: int, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        others = [graph.saved for graph in self._graphs.values()]
        saved, taken = _Saved(set().union(*(other.held for other in others))), sum(other.size for other in others)
        with torch.enable_grad():
            entering = _Entering.apply(self._anchor, x)  # type: ignore[no-untyped-call]
            saved.enter(x, parameters)
            with saved_tensors_hooks(saved.pack, saved.unpack):
                y = run(entering)
            saved.leave()
        if taken + saved.size > self._size:
            self._too_large(saved.size, self._size - taken)
            return y.detach()
        inputs = [get_gradient_edge(entering), *(get_gradient_edge(p) if p.requires_grad else None for p in parameters)]
        self._graphs[micro_batch] = _Graph(saved, y.shape, get_gradient_edge(y), inputs, self._twice)
        return y.detach()

    def begin(self, micro_batch: int) -> None:
        return None

    def again(
        self, run: Run, x: torch.Tensor, micro_batch: int, flat: torch.Tensor | None, parameters: Sequence[nn.Parameter]
    ) -> torch.Tensor:
        graph = self._graphs.get(micro_batch)
        if graph is None or graph.waits:
            if graph is not None:
                graph.waits = False
            return run(x)
        del self._graphs[micro_batch]
        y: torch.Tensor = _GoingOn.apply(graph, x, *parameters)  # type: ignore[no-untyped-call]
        return y

    def forget(self) -> None:
        self._graphs.clear()
