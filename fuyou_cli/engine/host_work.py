"""Counts what the launching thread does itself with the host's memory: a dictionary and an addition per copy or pass.

Counted where it is done, on every device; only on one with memory of its own does compute wait for it.
"""

from __future__ import annotations

import torch

from ..planner.host_work import HostWorkKind


class HostWork:
    """Of one executor. `seen` has bytes read and written since the last `take`, by kind."""

    def __init__(self) -> None:
        self.seen: dict[HostWorkKind, int] = {}

    def copied(self, kind: HostWorkKind, tensor: torch.Tensor) -> None:
        """As many bytes as `tensor` has were read and written."""
        self.seen[kind] = self.seen.get(kind, 0) + 2 * tensor.numel() * tensor.element_size()

    def take(self) -> dict[HostWorkKind, int]:
        """What was done since the last call."""
        seen, self.seen = self.seen, {}
        return seen
