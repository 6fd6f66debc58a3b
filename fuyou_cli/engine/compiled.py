"""Compiles blocks with torch.compile, once for all blocks that are alike.

A block's parameters are inputs of its graph, like its boundary. So the weights that the executor installs for a visit change no
guard. Forward runs the same graph as backward, so both compute the same values. A graph hides the model's operators: none is
left out, all are kept or none (`KeptGraphs`), and the gradients of all of a block's parameters arrive at once.

A graph does not save what a few elementwise operators compute again, also where a product in backward reads it: gated products,
the results of norms. So a graph of a Llama block is a third smaller, and backward takes as long (scripts/results/TRIED.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from ..core.errors import UsageError
from ..core.units import align_up, gib
from ..planner.boundary_layout import DEVICE_ALIGN, device_layouts
from ..spec.model import ITEM_SIZE, ModelSpec, OperatorSpec, StageSpec
from .activations import Activations, Forward
from .context import Context


def load_compiler() -> None:
    """Loads the compiler, so that the process is measured with it. Starts no workers, because they would share the arena.
    Forgets what earlier runs of the process compiled: torch compiles the same code only eight times."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    import torch._dynamo
    import torch._inductor.compile_fx

    torch._dynamo.reset()


def as_compiled(model: ModelSpec) -> ModelSpec:
    """Returns the model's specification with compiled blocks. One operator stands for all of a block's. Raises UsageError for a
    mixture of experts, whose products hang on where tokens are sent."""
    if any(stage.choices for stage in model.stages):
        raise UsageError(
            f"train.compile: the experts of {model.architecture} cannot be compiled", hint="leave train.compile false"
        )
    item, seen = ITEM_SIZE[model.compute_dtype], dict[tuple[OperatorSpec, ...], tuple[OperatorSpec, ...]]()

    def of(stage: StageSpec) -> StageSpec:
        if stage.kind != "block":
            return stage
        peak = stage.backward_peak + stage.params * item
        graph = OperatorSpec(index=0, name="graph", flops=stage.forward_flops, bytes=stage.graph_bytes)
        kept: tuple[OperatorSpec, ...] = (graph,) if stage.goes_back and stage.graph_bytes else ()
        operators = seen.setdefault(kept, kept)  # equal blocks share them: a search relies on it
        return replace(stage, operators=operators, unneeded=(), forward_peak=peak, backward_peak=peak)

    return replace(model, stages=tuple(map(of, model.stages)), compiled=True)


class CompiledBlocks(Activations):
    """The compiled forwards of one model's blocks, by class; the activations of those that keep nothing.
    `graphs`: compiled so far, forward and backward together. torch compiles again for a block that differs in what its code
    looks at. `say` gets a note, once, if a graph is larger than planned."""

    def __init__(self, backend: str = "inductor", *, say: Callable[[str], None] = lambda text: None) -> None:
        self.graphs = 0
        self._backend, self._say, self._said = backend, say, False
        self._forwards: dict[type[nn.Module], Callable[..., Any]] = {}

    def of(self, block: nn.Module) -> Callable[..., Any]:
        return partial(self._call, block)

    def activations(self, context: Context, uncompiled: Sequence[Activations]) -> list[Activations]:
        """Returns the activations of every stage. `uncompiled`: of those that are no blocks."""
        model, plan = context.model, context.plan
        layouts = device_layouts(model, plan.group, tuple(stage.kept_there for stage in plan.stages))

        def of(stage: StageSpec, uncompiled_one: Activations) -> Activations:
            if stage.kind != "block":
                return uncompiled_one
            if not plan.stages[stage.index].kept_there:
                return self
            return KeptGraphs(layouts[stage.index][1].size, twice=plan.norm_first, too_large=self._too_large)

        return list(map(of, model.stages, uncompiled))

    def _call(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException

        kind = type(block)
        if kind not in self._forwards:
            self._forwards[kind] = torch.compile(kind.forward, fullgraph=True, dynamic=False, backend=self._counted)
        try:
            return self._forwards[kind](block, *args, **kwargs)
        except TorchDynamoException as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UsageError(
                f"train.compile: {kind.__name__} cannot be compiled: {reason}",
                hint="leave train.compile false; on a CPU torch needs g++ to compile, on a GPU Triton",
            ) from error

    def _too_large(self, size: int, room: int) -> None:
        if not self._said:
            self._said = True
            self._say(
                f"note: the graph of a compiled block takes {gib(size)}, and the plan has {gib(room)} left for it. It is not "
                "kept: backward runs the block's forward again, and steps take longer than planned. `fuyou bench RECIPE` "
                "measures how large graphs are, for the next run; offload.activations=recompute plans without them"
            )

    def _counted(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo import lookup_backend
        from torch._functorch import config as partition

        self.graphs += 1
        if torch.are_deterministic_algorithms_enabled():
            import torch._inductor.config as inductor

            inductor.deterministic = True  # else a kernel is chosen by timing, and another process may choose another
        with partition.patch(ban_recompute_materialized_backward=False):
            return lookup_backend(self._backend)(graph, inputs)

    def forward(self, run: Forward, x: torch.Tensor, micro_batch: int, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        with torch.enable_grad():
            return run(x.detach().requires_grad_(True)).detach()


# ---- graphs kept on the device ------------------------------------------------------------------------------------
# Keeps the graph of a compiled block on the device from forward to backward, so that backward does not run the forward again.
#
# A graph holds the tensors that autograd saved. It does not hold those that lie in the block's input or weights: their memory
# is given to others after the visit, and backward has them again, maybe elsewhere. To these it refers by their place. All
# others stay where compute put them.


@dataclass(frozen=True, slots=True)
class _Reference:
    """Describes a tensor in memory that a visit brings: of its input (0) or of a parameter (from 1 on). `offset`: in elements,
    from where that one begins."""

    number: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class _Saved:
    """Packs what autograd saves. `size`: bytes that a graph holds, as a device's allocator rounds them. `counted`: storages
    that other graphs hold, which are not counted again."""

    def __init__(self, counted: Set[int] = frozenset()) -> None:
        self.size = 0
        self.held = set[int]()  # storages that the graph holds, so that no other gets their address
        self._counted = counted
        self._brought: list[torch.Tensor] = []  # by a visit that is under way
        self._first: dict[int, int] = {}  # by storage: the first of them that lies in it

    def enter(self, x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
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
        if storage._cdata not in self.held and storage._cdata not in self._counted:
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
    """The graph of one micro-batch by its ends: its output (`shape`), its input, and its parameters."""

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
        gradients = iter(torch.autograd.grad([graph.output], wanted, [gradient], allow_unused=True))
        graph.saved.leave()
        return None, *(None if edge is None else next(gradients) for edge in graph.inputs)


def graph_bytes(run: Forward, x: torch.Tensor, parameters: Sequence[nn.Parameter]) -> int:
    saved = _Saved()
    with torch.enable_grad():
        leaf = x.detach().requires_grad_(True)
        saved.enter(leaf, parameters)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            run(leaf)
    return saved.size


class KeptGraphs(Activations):
    """Of a compiled block that keeps its graphs, one per micro-batch, within `size` bytes. They share
    what is the same for all rows, like masks. `twice`: two backwards follow a forward. The first runs the forward again,
    because a compiled backward may write into what its graph saved. `too_large` gets the bytes of a graph that is not kept, and
    those that are left for it."""

    def __init__(self, size: int, *, twice: bool, too_large: Callable[[int, int], None]) -> None:
        self._size, self._twice, self._too_large = size, twice, too_large
        self._graphs: dict[int, _Graph] = {}  # by micro-batch
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(self, run: Forward, x: torch.Tensor, micro_batch: int, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        other_graphs = [graph.saved for graph in self._graphs.values()]
        saved, held = _Saved(set().union(*(other.held for other in other_graphs))), sum(other.size for other in other_graphs)
        with torch.enable_grad():
            entering = _Entering.apply(self._anchor, x)  # type: ignore[no-untyped-call]
            saved.enter(x, parameters)
            with saved_tensors_hooks(saved.pack, saved.unpack):
                y = run(entering)
            saved.leave()
        if held + saved.size > self._size:
            self._too_large(saved.size, self._size - held)
            return y.detach()
        inputs = [get_gradient_edge(entering), *(get_gradient_edge(p) if p.requires_grad else None for p in parameters)]
        self._graphs[micro_batch] = _Graph(saved, y.shape, get_gradient_edge(y), inputs, self._twice)
        return y.detach()

    def recompute(
        self, run: Forward, x: torch.Tensor, micro_batch: int, flat: torch.Tensor | None, parameters: Sequence[nn.Parameter]
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
