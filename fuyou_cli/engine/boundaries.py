"""The boundary of each stage (its input, the whole step's batch) as a tensor: copied to where the ledger keeps it."""

from __future__ import annotations

import torch

from ..core.errors import UsageError
from ..planner.boundaries import BoundaryLedger, Wait
from ..spec.plan import Plan, Span
from ..swap.daemon import SwapDaemon
from .host_memory import HostMemory


class Boundaries:
    """Stash in forward, take in backward, drop when the stage's backward is over."""

    def __init__(self, *, plan: Plan, daemon: SwapDaemon, memory: HostMemory) -> None:
        self.ledger, self.memory = BoundaryLedger(plan=plan, transfers=daemon), memory
        self._kinds: dict[int, tuple[torch.Size, torch.dtype]] = {}

    def stash(self, stage: int, boundary: torch.Tensor, wait_until: Wait) -> None:
        """Keeps a copy of `boundary` (host memory)."""
        span = self.ledger.room(stage, wait_until)
        size = boundary.numel() * boundary.element_size()
        if size > span.size:
            raise UsageError(
                f"the boundary of stage {stage} takes {size} bytes, planned {span.size}",
                hint="its dtype is wider than precision.compute: this model family is not supported yet",
            )
        self._kinds[stage] = (boundary.shape, boundary.dtype)
        self._view(stage, span).copy_(boundary)
        self.ledger.filled(stage, span, size)

    def take(self, stage: int, wait_until: Wait) -> torch.Tensor:
        """The boundary as stashed, valid until it is dropped."""
        return self._view(stage, self.ledger.ready(stage, wait_until))

    def drop(self, stage: int) -> None:
        self.ledger.drop(stage)

    def _view(self, stage: int, span: Span) -> torch.Tensor:
        shape, dtype = self._kinds[stage]
        return self.memory.tensor(span, dtype, shape.numel()).view(shape)
