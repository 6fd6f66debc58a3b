"""What crosses between the host and a device with memory of its own, micro-batch by micro-batch: while one computes, the
inputs of the next are on their way up and the results of the one before on their way down.

Such copies need pinned memory. The arena is: boundaries rest there, and what the model's own forward hands from stage to stage
is there as well, in spans of the plan that take turns (`WholeBatches`). So the host copies nothing, but what an operator of the
model's own made between two stages, which passes through the plan's upload slots. Of a visit's copies only the first upload and
the last download have no compute to run beside. On device cpu nothing is copied and nothing kept alive.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..core.units import align_up
from ..planner.device import BOUNDARIES_ACROSS
from ..planner.memory import COPY_ALIGN
from ..spec.plan import Plan, Span
from .computing import Computing
from .devices.base import Device, Event
from .host_memory import HostMemory, whole_batch
from .moves import Waiting

Source = Callable[[], list[torch.Tensor]]  # what a micro-batch computes with, in host memory; asked for once
Beside = Callable[[int], None]
Shape = tuple[int, ...]


def nothing_beside(number: int) -> None:
    """Nothing goes up with a micro-batch's inputs."""


@dataclass(slots=True)
class _Slot:
    """`busy`: the last copy out of it."""

    memory: torch.Tensor  # uint8, pinned
    busy: Event | None = None


class Crossings:
    """Copies of one visit at a time. `staged`: bytes read and written to bring inputs to pinned memory, as a plan charges."""

    def __init__(self, *, plan: Plan, memory: HostMemory, device: Device, waiting: Waiting) -> None:
        self.memory, self.device, self.waiting = memory, device, waiting
        self.slots = [_Slot(memory.tensor(span, torch.uint8)) for span in plan.upload_slots]
        self.batches = WholeBatches(memory, plan.batch_slots)
        self.staged = 0
        self.computing: Computing | None = None  # whoever hears of micro-batches, for a trace

    def into(self, sources: Iterable[Source], beside: Beside = nothing_beside) -> Arriving:
        """Begins to bring the inputs of a visit's micro-batches, in order. `beside` hears of each behind its upload, if any."""
        return Arriving(self, sources, beside)

    def begun(self, host: torch.Tensor) -> torch.Tensor:
        """Makes room on the device for what a visit computes first for these rows of a whole batch, to be `put` there."""
        return self.device.empty_like(host) if self.device.separate else host

    def count_staged(self, tensor: torch.Tensor) -> None:
        self.staged += 2 * tensor.numel() * tensor.element_size()


class WholeBatches:
    """Spans of the arena, each lent as one tensor at a time: until its last view is gone, wherever the model's own forward may
    keep one. Where all are lent, or too small, a tensor has memory of its own."""

    def __init__(self, memory: HostMemory, spans: tuple[Span, ...]) -> None:
        self._memory, self._spans = memory, spans
        self._lent: list[weakref.ref[memoryview] | None] = [None for _ in spans]

    def lend(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Makes a tensor of the whole batch, zeros or anything."""
        size = math.prod(shape) * dtype.itemsize
        for number, span in enumerate(self._spans):
            lent = self._lent[number]
            if span.size < 2 * size <= 2 * span.size and (lent is None or lent() is None):  # not for what all rows share
                view = self._memory.arena.view(span.offset, size)
                self._lent[number] = weakref.ref(view)  # the tensor's memory holds it, and nobody else
                return torch.frombuffer(view, dtype=dtype).view(shape)
        return whole_batch(shape, dtype)


class Arriving:
    """Inputs of the micro-batches of one visit, in turn; the first is on its way."""

    def __init__(self, crossings: Crossings, sources: Iterable[Source], beside: Beside) -> None:
        self._crossings, self._sources, self._beside = crossings, iter(sources), beside
        self._number = 0
        self._separate = crossings.device.separate
        self._ahead: list[tuple[torch.Tensor, Event]] = self._begin() if self._separate else []

    def take(self) -> list[torch.Tensor]:
        """Returns what the next micro-batch computes with, from now on; what the one behind it does is on its way."""
        if (computing := self._crossings.computing) is None:
            return self._taken()
        computing.end()
        taken = self._taken()
        computing.begin()
        return taken

    def _taken(self) -> list[torch.Tensor]:
        if not self._separate:
            return next(self._sources)()
        here, self._ahead = self._ahead, self._begin()
        with self._crossings.waiting(BOUNDARIES_ACROSS):
            for _, arrived in here:
                arrived.wait()
        return [tensor for tensor, _ in here]

    def _begin(self) -> list[tuple[torch.Tensor, Event]]:
        """Asks for uploads before the compute of the micro-batch in front is submitted: they run behind all that was."""
        source = next(self._sources, None)
        if source is None:
            return []
        slots, device = self._crossings.slots, self._crossings.device
        slot = slots[self._number % len(slots)]
        begun = []
        for host in self._pinned(slot, source()):
            target = device.empty_like(host)
            begun.append((target, device.upload(host, target)))
        if begun:
            slot.busy = begun[-1][1]
        self._beside(self._number)
        self._number += 1
        return begun

    def _pinned(self, slot: _Slot, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies those that do not rest in the arena into this turn's slot, as far as there is room."""
        if slot.busy is not None:
            with self._crossings.waiting(BOUNDARIES_ACROSS):
                slot.busy.synchronize()  # sync: the upload of the micro-batch before last, which has been computed with
        pinned, end = [], 0
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if not self._crossings.memory.holds(tensor) and end + size <= slot.memory.numel():
                self._crossings.count_staged(tensor)
                tensor = slot.memory[end : end + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
                end = align_up(end + size, COPY_ALIGN)
            pinned.append(tensor)
        return pinned


@dataclass(frozen=True, slots=True)
class _Return:
    """A result on its way to the host. `part`: the device's memory is not used for something else meanwhile."""

    part: torch.Tensor
    event: Event


class Leaving:
    """What leaves the device in one visit, micro-batch by micro-batch: in its place while the next one computes."""

    def __init__(self, crossings: Crossings) -> None:
        self._device, self._waiting = crossings.device, crossings.waiting
        self._beside: list[_Return] = []  # of the micro-batch under way
        self._under_way: list[list[_Return]] = []  # of micro-batches

    def put(self, part: torch.Tensor, host: torch.Tensor) -> None:
        """Sends `part`, the micro-batch's result on the device, to `host`, which is contiguous, in its dtype. Its compute is
        submitted; nobody writes into it any more. On device cpu it may be there already."""
        if self._device.separate:
            self._submit(part.detach().to(host.dtype).contiguous(), host)
        elif part.data_ptr() != host.data_ptr():
            host.copy_(part)

    def keep(self, part: torch.Tensor, host: torch.Tensor) -> None:
        """Sends `part`, on the device, to `host` while the micro-batch computes with it, and writes nothing into it."""
        part = part.contiguous()
        self._beside.append(_Return(part, self._device.download(part, host)))

    def settle(self) -> None:
        """Waits until everything is in its place."""
        while self._under_way:
            self._arrive()

    def _submit(self, part: torch.Tensor, host: torch.Tensor) -> None:
        """Sends the last of a micro-batch. The host waits for the one before: that bounds the device's memory."""
        self._under_way.append([*self._beside, _Return(part, self._device.download(part, host))])
        self._beside.clear()
        while len(self._under_way) > 1:
            self._arrive()

    def _arrive(self) -> None:
        for oldest in self._under_way.pop(0):
            with self._waiting(BOUNDARIES_ACROSS):
                oldest.event.synchronize()  # sync: the results of the micro-batch before this one, or at the end the last


class Gathering:
    """A visit's results as one tensor of the whole batch, in host memory."""

    def __init__(self, crossings: Crossings, rows: int) -> None:
        self.leaving, self._crossings, self._rows = Leaving(crossings), crossings, rows
        self._as_it_is = not crossings.device.separate
        self._whole: torch.Tensor | None = None

    def put(self, rows: slice, part: torch.Tensor) -> None:
        """`part`: (rows, ...) on the device. On device cpu the only part is the whole, and is not copied."""
        if self._as_it_is and part.shape[0] == self._rows:
            self._whole = part
            return
        if self._whole is None:
            self._whole = self._crossings.batches.lend((self._rows, *part.shape[1:]), part.dtype)
        self.leaving.put(part, self._whole[rows])

    def settled(self) -> torch.Tensor:
        """Returns the whole batch, once every part is there."""
        self.leaving.settle()
        assert self._whole is not None
        return self._whole
