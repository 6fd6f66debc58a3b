"""What the parts of the engine share for as long as a run lasts, host memory as tensors among it."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from functools import cached_property

import torch

from ..spec.model import ModelSpec
from ..spec.plan import Plan, Span
from ..swap.daemon import SwapDaemon
from ..swap.store import Arena
from .anatomy import Anatomy
from .devices.base import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """`anatomy` and `model` are the same model, as modules and as numbers. `plan` says where its bytes rest. `daemon`
    moves them between the arena (`memory`) and the store, and updates them. `device` computes."""

    anatomy: Anatomy
    model: ModelSpec
    plan: Plan
    daemon: SwapDaemon
    memory: HostMemory
    device: Device


# ---- host memory ---------------------------------------------------------------------------------------------------
# Gives host memory as tensors: views of the arena's planned spans without copies, and whole-batch tensors outside the
# arena.


PAGE = 4096  # bytes; touching one part of a larger page takes the whole page
_SMALL = 1 << 20  # bytes of a whole-batch tensor; smaller ones are not worth the page faults


class HostMemory:
    """Gives views of one arena. A view is valid until the arena is closed."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._by_dtype: dict[torch.dtype, torch.Tensor] = {}

    @cached_property
    def _begin(self) -> int:
        return torch.frombuffer(self.arena.view(0, 1), dtype=torch.uint8).data_ptr()

    def tensor(self, span: Span, dtype: torch.dtype, count: int | None = None) -> torch.Tensor:
        """Returns a flat tensor over `span`: `count` elements from its start, or all of it."""
        flat = torch.frombuffer(self.arena.view(span.offset, span.size), dtype=dtype)
        return flat if count is None else flat[:count]

    def all_of(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns all of the arena as a flat tensor, as far as whole elements of `dtype` go."""
        if dtype not in self._by_dtype:
            size = self.arena.size // dtype.itemsize * dtype.itemsize
            self._by_dtype[dtype] = torch.frombuffer(self.arena.view(0, size), dtype=dtype)
        return self._by_dtype[dtype]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in the arena, which a device may have pinned."""
        return self._begin <= tensor.data_ptr() < self._begin + self.arena.size

    def take(self) -> None:
        """Takes every page of the arena from the system. So a lack of memory shows before the first step, not when some step
        first needs a slot. The contents of pages stay. Nothing may be under way."""
        torch.frombuffer(self.arena.view(0, self.arena.size), dtype=torch.uint8)[::PAGE].add_(0)


def whole_batch(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of a whole batch, zeros or uninitialized, in its own mapping that is freed with its last view.

    It stays while the blocks of every micro-batch come and go. In the heap it would pin everything freed below it: a hole of a
    hundred MiB, which would later serve a head's logits. Those should be mapped themselves, so that the system gets them back
    when they are freed.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALL:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype).view(shape)
