"""The arena as tensors: typed views of planned spans, without copies."""

from __future__ import annotations

import torch

from ..spec.plan import Span
from ..swap.arena import Arena

PAGE = 4096  # bytes; larger ones are taken by the first of their parts


class HostMemory:
    """Views of one arena. A view is valid until the arena is closed."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def tensor(self, span: Span, dtype: torch.dtype, count: int | None = None) -> torch.Tensor:
        """A flat tensor over `span`; `count` elements from its start, or all of it."""
        flat = torch.frombuffer(self.arena.view(span.offset, span.size), dtype=dtype)
        return flat if count is None else flat[:count]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in the arena, which a device may have pinned."""
        begin = torch.frombuffer(self.arena.view(0, 1), dtype=torch.uint8).data_ptr()
        return begin <= tensor.data_ptr() < begin + self.arena.size

    def take(self) -> None:
        """Every page of the arena is the process's from now on: what does not fit is known before the first step, not when
        some step first needs a slot that none before it needed. What the pages hold stays; nothing may be under way."""
        torch.frombuffer(self.arena.view(0, self.arena.size), dtype=torch.uint8)[::PAGE].add_(0)
