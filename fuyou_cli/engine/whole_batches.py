"""Lends memory for whole-batch tensors between stages, in spans of the arena or the device that are reused."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

import torch
from torch.utils.dlpack import from_dlpack

from ..spec.plan import Span
from .devices.base import Device, Event
from .host_memory import HostMemory, whole_batch

Shape = tuple[int, ...]
Lent = tuple[torch.Tensor, weakref.ref[object]]  # a span as bytes, and an object that lives as long as a view of that tensor


class WholeBatches:
    """Holds spans. Each is lent as one tensor at a time, until its last view is gone, wherever the model's own forward keeps
    one. If all are lent or too small, a tensor gets its own memory."""

    def __init__(
        self,
        spans: tuple[Span, ...],
        made: Callable[[Span, int], Lent],
        beside: Callable[[Shape, torch.dtype], torch.Tensor],
        whole: torch.Tensor | None = None,
    ) -> None:
        """Takes two functions: `made` lends a span, `beside` makes a tensor if none is free. `whole`: the device memory that
        the spans are part of."""
        self._spans, self._made, self._beside, self.whole = list(spans), made, beside, whole
        self._lent: dict[int, weakref.ref[object]] = {}  # by offset: the object that lives as long as the loan
        self._read: dict[int, list[Event]] = {}  # copies out of a span, which must end before it is written again

    @classmethod
    def in_arena(cls, memory: HostMemory, spans: tuple[Span, ...]) -> WholeBatches:
        def made(span: Span, size: int) -> Lent:
            view = memory.arena.view(span.offset, size)
            return torch.frombuffer(view, dtype=torch.uint8), weakref.ref(view)  # only the tensor's memory holds it

        return cls(spans, made, whole_batch)

    @classmethod
    def on_device(cls, device: Device, spans: tuple[Span, ...]) -> WholeBatches:
        whole = device.empty(max(span.offset + span.size for span in spans))

        def made(span: Span, size: int) -> Lent:
            # A tensor over the same memory with its own storage, which lives as long as the tensor's last view.
            flat = from_dlpack(whole[span.offset : span.offset + size])
            return flat, weakref.ref(flat.untyped_storage())

        def beside(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
            return device.empty(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

        return cls(spans, made, beside, whole)

    def lend(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor of the whole batch, zeros or uninitialized, for compute submitted from now on. It lies in the free
        span lent longest ago."""
        size = math.prod(shape) * dtype.itemsize
        for number, span in enumerate(self._spans):
            lent = self._lent.get(span.offset)
            # Small tensors, like those that all rows share, take no span of a whole batch.
            fills = span.size / 2 < size <= span.size
            if fills and (lent is None or lent() is None):
                self._spans.append(self._spans.pop(number))
                for event in self._read.pop(span.offset, []):
                    event.wait()
                flat, self._lent[span.offset] = self._made(span, size)
                return flat.view(dtype).view(shape)
        return self._beside(shape, dtype)

    def copied(self, part: torch.Tensor, copy: Callable[[torch.Tensor], Event]) -> Event:
        """Notes a copy from what may be a part of a span (contiguous). The next user of the span waits for the copy."""
        if self.whole is None:
            return copy(part)
        place = part.data_ptr() - self.whole.data_ptr()
        for span in self._spans:
            if span.offset <= place < span.offset + span.size:
                size = part.numel() * part.element_size()
                event = copy(self.whole[place : place + size].view(part.dtype).view(part.shape))
                self._read.setdefault(span.offset, []).append(event)
                return event
        return copy(part)
