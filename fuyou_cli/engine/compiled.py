"""Compiles blocks with torch.compile, once for all blocks that are alike.

A block's parameters are inputs of its graph, like its boundary. So the weights that the executor installs for a visit change no
guard. Forward runs the same graph as backward, so both compute the same values. A graph hides the model's operators: none is
left out, all are kept or none (`activations/graphs`), and the gradients of all of a block's parameters arrive at once.

A graph does not save what a few elementwise operators compute again, also where a product in backward reads it: gated products,
the results of norms. So a graph of a Llama block is a third smaller, and backward takes as long (scripts/results/TRIED.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..core.errors import UsageError
from ..core.units import gib
from ..planner.boundary_layout import device_layouts
from ..spec.model import ITEM_SIZE, ModelSpec, OperatorSpec, StageSpec
from ..spec.plan import Plan
from .activations import Activations
from .activations.graphs import KeptGraphs
from .activations.recompute import Run


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
        found: tuple[OperatorSpec, ...] = (graph,) if stage.goes_back and stage.graph_bytes else ()
        operators = seen.setdefault(found, found)  # equal blocks share them: a search relies on it
        return replace(stage, operators=operators, unneeded=(), forward_peak=peak, backward_peak=peak)

    return replace(model, stages=tuple(map(of, model.stages)), compiled=True)


class CompiledBlocks:
    """Holds the compiled forwards of one model's blocks, by class. Implements `Activations` for those that keep nothing.
    `graphs`: compiled so far, forward and backward together. torch compiles again for a block that differs in what its code
    looks at. `say` gets a note, once, if a graph is larger than planned."""

    def __init__(self, backend: str = "inductor", *, say: Callable[[str], None] = lambda text: None) -> None:
        self.graphs = 0
        self._backend, self._say, self._told = backend, say, False
        self._forwards: dict[type[nn.Module], Callable[..., Any]] = {}

    def of(self, block: nn.Module) -> Callable[..., Any]:
        """Returns the replacement for the block's own forward."""
        return partial(self._call, block)

    def activations(self, model: ModelSpec, plan: Plan, others: Sequence[Activations]) -> list[Activations]:
        """Returns the activations of every stage. `others`: of those that are no blocks."""

        layouts = device_layouts(model, plan.group, tuple(stage.kept_there for stage in plan.stages))

        def of(stage: StageSpec, other: Activations) -> Activations:
            if stage.kind != "block":
                return other
            if not plan.stages[stage.index].kept_there:
                return self
            return KeptGraphs(layouts[stage.index][1].size, twice=plan.norm_first, too_large=self._too_large)

        return list(map(of, model.stages, others))

    def _call(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException

        kind = type(block)
        if kind not in self._forwards:
            self._forwards[kind] = torch.compile(kind.forward, fullgraph=True, dynamic=False, backend=self._counted)
        try:
            return self._forwards[kind](block, *args, **kwargs)
        except TorchDynamoException as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UsageError(
                f"train.compile: {kind.__name__} cannot be compiled: {said}",
                hint="leave train.compile false; on a CPU torch needs g++ to compile, on a GPU Triton",
            ) from error

    def _too_large(self, size: int, left: int) -> None:
        if not self._told:
            self._told = True
            self._say(
                f"note: the graph of a compiled block takes {gib(size)}, and the plan has {gib(left)} left for it. It is not "
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

    def forward(self, run: Run, x: torch.Tensor, micro_batch: int, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        with torch.enable_grad():
            return run(x.detach().requires_grad_(True)).detach()

    def begin(self, micro_batch: int) -> None:
        return None

    def again(
        self, run: Run, x: torch.Tensor, micro_batch: int, flat: torch.Tensor | None, parameters: Sequence[nn.Parameter]
    ) -> torch.Tensor:
        return run(x)

    def forget(self) -> None:
        return None
