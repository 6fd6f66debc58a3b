"""Computes visits of blocks, norms and projections, micro-batch by micro-batch: forward, and backward from what forward
kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...core.errors import UsageError
from ...spec.micro_batch import MicroBatch
from ..activations import Activations
from ..activations.recompute import Run
from ..anatomy import Installed
from ..crossings import Gathering
from ..gradients import GradientSum
from ..routing import Roots, RoutedVisit, Routing
from ..streamed import Call
from ..visits import Visits


@dataclass(frozen=True, slots=True)
class Beside:
    """Says where a stage's backward begins beside its output. `gradients`: of the whole batch; `roots` returns, for those of a
    micro-batch, tensors of its forward with their gradients."""

    gradients: torch.Tensor
    roots: Callable[[Installed, torch.Tensor], Roots]


class _Writers(TorchDispatchMode):
    """Finds the operators that write into a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()
        self._storage = 0

    def watched(self, x: torch.Tensor) -> torch.Tensor:
        self._storage = x.untyped_storage()._cdata
        return x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = args[0] if args and func._schema.is_mutable else None
        if isinstance(written, torch.Tensor) and written.untyped_storage()._cdata == self._storage:
            self.found.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


class BlockPasses:
    """Computes stages whose input is a boundary. `activations`: by stage; `routing`: None if nothing of it is kept."""

    def __init__(self, visits: Visits, activations: Sequence[Activations], routing: Routing | None = None) -> None:
        self.visits, self.activations, self._routing = visits, activations, routing
        self._begins: Beside | None = None  # of the backward under way

    def forward(self, call: Call, x: torch.Tensor) -> torch.Tensor:
        """Returns the stage's output for the whole batch. x: (batch, tokens, ...)."""
        visits = self.visits
        visit, flat = visits.enter("forward", call.stage, x)
        begin = time.monotonic()
        state = visits.device.random_state()
        with torch.no_grad(), visits.installed(call.stage, flat) as parameters:
            y = self.computed(call, x, parameters, stash=visit.stash and visits.device.separate)
        visits.device.restore_random_state(state)
        visits.boundaries.seal(call.stage)
        visits.leave(visit, begin)
        return y

    def _routed(self, stage: int, parameters: Installed, *, again: bool) -> AbstractContextManager[RoutedVisit | None]:
        return nullcontext() if self._routing is None else self._routing.visit(stage, parameters, again=again)

    def computed(self, call: Call, x: torch.Tensor, parameters: Installed, *, stash: bool) -> torch.Tensor:
        """Computes a visit. `stash`: the boundary is copied to its place from the device, by micro-batch."""
        visits, activations = self.visits, self.activations[call.stage]
        y = Gathering(visits.crossings, x.shape)
        micro_batches = visits.micro_batches(x)
        arriving = visits.inputs(partial(lambda of: [of(x).contiguous()], each.of) for each in micro_batches)
        with self._routed(call.stage, parameters, again=False) as routed:
            for number, micro_batch in enumerate(micro_batches):
                (part,) = arriving.take()
                version = part._version
                if stash:
                    kept = y.leaving.keep(part, visits.boundaries.rows(call.stage, number))
                    visits.boundaries.awaits(call.stage, kept)
                visits.seed(call.stage, number)
                if routed is not None:
                    routed.begin(number, micro_batch)
                y.put(micro_batch, activations.forward(call.of(number), part, number, parameters))
                if stash and part._version != version:
                    raise self._written_into(call.stage, call.of(number), part)
                self._computed(micro_batch, parameters)
                if len(micro_batches) > 1:
                    visits.between()
        return y.settled()

    def _computed(self, part: MicroBatch, parameters: Installed) -> None:
        """Called after each micro-batch of a forward."""

    def _written_into(self, number: int, run: Run, x: torch.Tensor) -> UsageError:
        """Returns the error for a model that writes into a stage's input: the copy of the input on the host may contain what
        was written."""
        writers = _Writers()
        with writers:
            run(writers.watched(x.clone()))
        operators = ", ".join(sorted(writers.found)) or "an operator"
        stage = self.visits.stages[number]
        name = f"{stage.name} ({type(stage.module).__name__})"
        return UsageError(
            f"{name} writes into its own input ({operators}), which backward needs unchanged",
            hint="change the model's code to write into a copy; if you cannot change it, it cannot be streamed on a GPU",
        )

    def backward(self, call: Call, ids: torch.Tensor | None, grad_y: torch.Tensor) -> torch.Tensor | None:
        """Returns the gradient of the stage's input for the whole batch, and sums the stage's own. Returns None for `ids`, and
        where no stage below learns anything."""
        visits = self.visits
        visit, flat = visits.enter("backward", call.stage)
        boundary = visits.boundaries.take(call.stage, visits.residency.wait_until) if visit.take else []
        total = visits.sums.open(call.stage, resume=visit.resume)
        begin = time.monotonic()
        grad_x = self.differentiated(call, boundary if ids is None else [ids], grad_y, flat, total)
        if visit.take:
            (visits.boundaries.leave if visit.measures else visits.boundaries.drop)(call.stage)
        visits.sums.end(visit, call.stage, total)
        visits.leave(visit, begin)
        return grad_x

    def differentiated(
        self, call: Call, x: list[torch.Tensor], grad_y: torch.Tensor, flat: torch.Tensor | None, total: GradientSum | None
    ) -> torch.Tensor | None:
        """Differentiates a visit. x: the boundary by micro-batch."""
        visits, activations = self.visits, self.activations[call.stage]
        micro_batches = visits.micro_batches(grad_y)
        given = [grad_y] if self._begins is None else [grad_y, self._begins.gradients]
        sources = (
            partial(lambda n, each: [x[n], *(each.of(whole).contiguous() for whole in given)], *each)
            for each in enumerate(micro_batches)
        )
        arriving = visits.inputs(sources, beside=activations.begin)
        grad_x = Gathering(visits.crossings, grad_y.shape)
        passes_on = visits.model.stages[call.stage].passes_on
        with (
            visits.learning(call.stage, flat, total) as parameters,
            self._routed(call.stage, parameters, again=True) as routed,
        ):
            for number, micro_batch in enumerate(micro_batches):
                part, grad, *more = arriving.take()
                part = part.detach().requires_grad_(True)  # as in forward, so that the same kernels run
                visits.seed(call.stage, number)
                if routed is not None:
                    routed.begin(number, micro_batch)
                with torch.enable_grad():
                    y = activations.again(call.of(number), part, number, flat, parameters)
                    beside = [] if routed is None else routed.roots()
                    if self._begins is not None:
                        beside += self._begins.roots(parameters, *more)
                    visits.differentiate(y, grad, [part, *parameters] if passes_on else parameters, beside)
                del y, grad, more, beside
                if passes_on:
                    assert part.grad is not None
                    grad_x.put(micro_batch, part.grad)
                if len(micro_batches) > 1:
                    visits.between()
        visits.boundaries.awaits(call.stage, *arriving.uploads)
        return grad_x.settled() if passes_on else None
