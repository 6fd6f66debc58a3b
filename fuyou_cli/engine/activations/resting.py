"""Describes where kept outputs rest, and finds the tensors there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

_REMEMBERED = 1024  # views of a stage: its outputs, by micro-batch


@dataclass(frozen=True, slots=True)
class Resting:
    """Describes one tensor of a kept output. It begins `offset` bytes after the output's start."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, value: torch.Tensor, offset: int) -> Resting:
        """Describes a tensor like `value`, without gaps."""
        stride = value.stride() if value.is_contiguous() else torch.empty_like(value, device="meta").stride()
        return cls(offset, value.dtype, value.shape, stride)

    @property
    def end(self) -> int:
        return self.offset + self.shape.numel() * self.dtype.itemsize


class Views:
    """Finds tensors in one memory. `memory`: returns all of it as a flat tensor of a dtype.

    A view is remembered, as the launching thread takes longer to make one.
    """

    def __init__(self, memory: Callable[[torch.dtype], torch.Tensor]) -> None:
        # The function does not refer to `self`: in a cycle, views would hold a device's memory until the collector runs.
        self._view = lru_cache(maxsize=_REMEMBERED)(partial(_made, memory))

    def at(self, begin: int, resting: Resting) -> torch.Tensor:
        """Returns the tensor, where the output's memory begins at byte `begin`. What is written elsewhere into that memory does
        not count as a change of it."""
        return self._view(begin + resting.offset, resting.dtype, resting.shape, resting.stride).data


def _made(
    memory: Callable[[torch.dtype], torch.Tensor], begin: int, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]
) -> torch.Tensor:
    return memory(dtype).as_strided(shape, stride, begin // dtype.itemsize)
