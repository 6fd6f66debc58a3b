"""The arena as tensors: typed views of planned spans, without copies."""

from __future__ import annotations

import torch

from ..spec.plan import Span
from ..swap.arena import Arena


class HostMemory:
    """Views of one arena. A view is valid until the arena is closed."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def tensor(self, span: Span, dtype: torch.dtype, count: int | None = None) -> torch.Tensor:
        """A flat tensor over `span`; `count` elements from its start, or all of it."""
        flat = torch.frombuffer(self.arena.view(span.offset, span.size), dtype=dtype)
        return flat if count is None else flat[:count]
