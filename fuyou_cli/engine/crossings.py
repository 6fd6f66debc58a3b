"""Copies between the host and a separate device, micro-batch by micro-batch. While one computes, the inputs of the next go up
and the results of the one before come down.

Such copies need pinned memory. The arena is pinned: boundaries rest there, and so do whole-batch tensors between stages, in
spans of the plan that are used in turn. So the host copies nothing, except what the model's own operators compute between two
stages, which passes through the plan's upload slots. Of a visit's copies only the first upload and the last download have no
compute to hide them. On device cpu nothing is copied and nothing kept alive.

If the plan has room for the batch on the device, whole-batch tensors stay there, and only what is kept for backward is copied.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.utils.dlpack import from_dlpack

from ..core.units import align_up
from ..planner.device import BOUNDARIES_ACROSS, COPY_ALIGN
from ..spec.plan import MicroBatch, Span
from .context import Context, HostMemory, whole_batch
from .devices.base import Device, Event, Moment
from .moves import Waiting

if TYPE_CHECKING:
    from .link import Giving  # loads torch.distributed, which one process does not need

HostInputs = Callable[[], list[torch.Tensor]]  # gives a micro-batch's inputs in host memory; called once
AfterUpload = Callable[[int], None]
TakeResult = Callable[[torch.Tensor], None]  # gets a micro-batch's result when it is in host memory


@dataclass(slots=True)
class _Place:
    """Memory that copies take turns at. `used`: the end of what read it last, a copy or compute."""

    memory: torch.Tensor  # uint8
    used: Event | None = None


class Crossings:
    """Makes copies of one visit at a time. `staged`: bytes read and written to bring inputs to pinned memory, as a plan
    charges."""

    def __init__(self, context: Context, *, waiting: Waiting) -> None:
        plan, memory, device = context.plan, context.memory, context.device
        self.memory, self.device, self.waiting = memory, device, waiting
        self.on_device = plan.batch_on_device
        self.across = device.separate and not self.on_device  # tensors between stages pass through the host
        self.slots = [_Place(memory.tensor(span, torch.uint8)) for span in plan.upload_slots]
        self.inputs: Inputs | None = None
        if self.on_device:
            numerics = plan.numerics
            boundary = context.model.widest_bytes_per_token * numerics.micro_batch_tokens
            # Kept outputs that are uploaded for a micro-batch have their own memory, so fewer may be under way.
            ahead = 1 if any(stage.kept for stage in plan.stages) else 2
            self.inputs = Inputs(device, boundary, min(2, numerics.micro_batches), ahead=ahead)
            self.batches = WholeBatches.on_device(device, plan.batch_slots)
        else:
            self.batches = WholeBatches.in_arena(memory, plan.batch_slots)
        self.staged = 0
        self.computing: Computing | None = None  # records micro-batches, for a trace

    def room_for(self, host: torch.Tensor) -> torch.Tensor:
        """Makes room on the device for the first result of a visit for this part of a whole batch, which `put` fills."""
        if self.across or not host.is_contiguous():
            return self.device.empty_like(torch.empty(host.shape, dtype=host.dtype, device="meta"))
        return host

    def beside_batch(self, value: torch.Tensor) -> torch.Tensor:
        """Returns ids or targets of the whole batch where a visit wants them: on the device if the batch is there."""
        if not self.on_device:
            return value
        return self.upload_now(value)

    def upload_now(self, value: torch.Tensor) -> torch.Tensor:
        """Returns on the device what the host knows of the batch, before anything is submitted."""
        if self.device.separate:
            self.count_staged(value)
        return self.device.upload_now(value)

    def count_staged(self, tensor: torch.Tensor) -> None:
        self.staged += 2 * tensor.numel() * tensor.element_size()


class Inputs:
    """Uploads boundaries to a device that holds the rest of the batch. Two places are used in turn, also across the end of a
    visit, so a visit's first boundary is uploaded while the visit before still computes. `ahead`: micro-batches that are
    submitted and not yet computed, not counting the next."""

    def __init__(self, device: Device, size: int, places: int, *, ahead: int) -> None:
        self._device, self._most_ahead = device, ahead
        self._places = [_Place(device.empty(size)) for _ in range(places)]
        self._computing: _Place | None = None  # the one whose compute is submitted, or will be next
        self._next: _Place | None = None
        self._compute_ends = deque[Event]()  # one event per micro-batch: the end of the compute before it

    def upload(self, host: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """Starts the copy of one micro-batch's boundary. Call it at most once between two turns."""
        size = host.numel() * host.element_size()
        self._places.append(self._places.pop(0))
        self._next = place = self._places[-1]
        if size > place.memory.numel():  # fresh memory, which submitted compute may still use: the copy waits for all of it
            target = self._device.empty_like(host)
            return target, self._device.upload(host, target)
        target = place.memory[:size].view(host.dtype).view(host.shape)
        # The place that computes has no event for its last reader yet (`turn`): there, too, the copy waits for all compute.
        return target, self._device.upload(host, target, after=None if place is self._computing else place.used)

    def turn(self) -> None:
        """Notes that another micro-batch is about to compute. Limits how far the host runs ahead, and so the device's
        memory."""
        before = self._device.compute_end()
        if self._computing is not None:
            self._computing.used = before
        self._computing, self._next = self._next, None
        self._compute_ends.append(before)
        if len(self._compute_ends) > self._most_ahead:
            self._compute_ends.popleft().synchronize()  # sync: one or two micro-batches behind; the device does not wait for it


class Arriving:
    """Brings the inputs of one visit's micro-batches, in order. The first is on its way. `after_upload` is called with each
    micro-batch after its upload was submitted. `uploads`: the uploads of all visits so far."""

    def __init__(self, crossings: Crossings, sources: Iterable[HostInputs], after_upload: AfterUpload) -> None:
        self._crossings, self._sources, self._after_upload = crossings, iter(sources), after_upload
        self._number = 0
        self.uploads: list[Event] = []
        self._separate = crossings.device.separate
        self._ahead: list[tuple[torch.Tensor, Event]] = self._begin() if self._separate else []

    def take(self) -> list[torch.Tensor]:
        """Returns the inputs of the next micro-batch, to compute with from now on. Starts the upload of the one after it."""
        if (computing := self._crossings.computing) is None:
            return self._next_inputs()
        computing.end()
        inputs = self._next_inputs()
        computing.begin()
        return inputs

    def _next_inputs(self) -> list[torch.Tensor]:
        if not self._separate:
            return next(self._sources)()
        if self._crossings.inputs is not None:
            self._crossings.inputs.turn()
        inputs, self._ahead = self._ahead, self._begin()
        with self._crossings.waiting(BOUNDARIES_ACROSS):
            for _, arrived in inputs:
                arrived.wait()
        return [tensor for tensor, _ in inputs]

    def _begin(self) -> list[tuple[torch.Tensor, Event]]:
        """Asks for uploads before the compute of the previous micro-batch is submitted, so that they run after all earlier
        compute."""
        source = next(self._sources, None)
        if source is None:
            return []
        uploads = self._upload_from_arena(source()) if self._crossings.on_device else self._upload_by_slot(source())
        self.uploads += [event for _, event in uploads]
        self._after_upload(self._number)
        self._number += 1
        return uploads

    def _upload_from_arena(self, tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, Event]]:
        """Uploads tensors that are in the arena. All others are on the device already."""
        inputs, memory = self._crossings.inputs, self._crossings.memory
        assert inputs is not None
        return [inputs.upload(tensor) if memory.holds(tensor) else (tensor, Event()) for tensor in tensors]

    def _upload_by_slot(self, tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, Event]]:
        slots, device = self._crossings.slots, self._crossings.device
        slot = slots[self._number % len(slots)]
        uploads = []
        for host in self._pinned(slot, tensors):
            target = device.empty_like(host)
            uploads.append((target, device.upload(host, target)))
        if uploads:
            slot.used = uploads[-1][1]
        return uploads

    def _pinned(self, slot: _Place, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies the tensors that are not in the arena into this turn's slot, as far as they fit."""
        if slot.used is not None:
            with self._crossings.waiting(BOUNDARIES_ACROSS):
                slot.used.synchronize()  # sync: the upload of the micro-batch before last, which has been computed
        pinned, end = [], 0
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if not self._crossings.memory.holds(tensor) and end + size <= slot.memory.numel():
                self._crossings.count_staged(tensor)
                tensor = slot.memory[end : end + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
                end = align_up(end + size, COPY_ALIGN)
            pinned.append(tensor)
        return pinned


def clear_padding(batch: torch.Tensor, micro_batch: MicroBatch) -> None:
    """Makes what a micro-batch does not compute of its rows zero: the model's own forward may add it up with other rows."""
    if micro_batch.width < batch.shape[1]:
        batch[micro_batch.rows, micro_batch.width :].zero_()


class Leaving:
    """Copies the results of one visit to the host, micro-batch by micro-batch. One is copied while the next computes."""

    def __init__(self, crossings: Crossings) -> None:
        self._device, self._waiting, self._across = crossings.device, crossings.waiting, crossings.across
        self._batches, self._memory = crossings.batches, crossings.memory
        # Results on their way to the host: held so that their device memory is not reused before the copy ends.
        self._input_copies: list[tuple[torch.Tensor, Event]] = []  # of the micro-batch under way
        self._under_way: list[tuple[list[tuple[torch.Tensor, Event]], Callable[[], None] | None]] = []  # by micro-batch

    def put(self, part: torch.Tensor, host: torch.Tensor, then: TakeResult | None = None) -> None:
        """Sends `part`, the micro-batch's result on the device, to `host`, in its dtype. Its compute is submitted, and nobody
        writes into it any more. If nothing is copied, it may be in its place already. `then` is called with `host` when all of
        it is there."""
        arrived = None if then is None else partial(then, host)
        if self._across and not host.is_contiguous():  # some tokens of each row
            for number, (row, place) in enumerate(zip(part, host, strict=True), start=1):
                self._submit(row.detach().to(host.dtype).contiguous(), place, arrived if number == len(part) else None)
        elif self._across:
            self._submit(part.detach().to(host.dtype).contiguous(), host, arrived)
        else:
            if part.data_ptr() != host.data_ptr():
                host.copy_(part)
            if arrived is not None:
                arrived()

    def keep(self, part: torch.Tensor, host: torch.Tensor) -> Event:
        """Sends `part`, on the device, to `host` while the micro-batch computes with it. Nobody may write into it. If the place
        is on the device too, compute copies it."""
        if not self._memory.holds(host):
            host.copy_(part)
            return Event()
        part = part.contiguous()
        if not self._across:
            return self._batches.copied(part, lambda source: self._device.download(source, host))
        event = self._device.download(part, host)
        self._input_copies.append((part, event))
        return event

    def settle(self) -> None:
        while self._under_way:
            self._arrive()

    def _submit(self, part: torch.Tensor, host: torch.Tensor, arrived: Callable[[], None] | None) -> None:
        """Sends the last results of a micro-batch. The host waits for those of the one before, which bounds the device's
        memory."""
        self._under_way.append(([*self._input_copies, (part, self._device.download(part, host))], arrived))
        self._input_copies.clear()
        while len(self._under_way) > 1:
            self._arrive()

    def _arrive(self) -> None:
        copies, arrived = self._under_way.pop(0)
        for _, event in copies:
            with self._waiting(BOUNDARIES_ACROSS):
                # Sync: the results of the micro-batch before this one, or of the last one at the end.
                event.synchronize()
        if arrived is not None:
            arrived()


class Gathering:
    """Gathers a visit's results in one tensor of the whole batch, in host memory or on the device. Padding that no micro-batch
    computes is zero there. `gives`: sends each result to another rank."""

    def __init__(self, crossings: Crossings, shape: torch.Size, gives: Giving | None = None) -> None:
        """`shape`: rows and tokens of the whole batch come first."""
        self.leaving, self._crossings, self._shape, self._gives = Leaving(crossings), crossings, tuple(shape[:2]), gives
        self._as_it_is = not crossings.device.separate
        self._batch: torch.Tensor | None = None

    def put(self, micro_batch: MicroBatch, part: torch.Tensor) -> None:
        """Puts a part in its place. `part`: (rows, tokens, ...) on the device. On device cpu it may be the whole, and is not
        copied."""
        gives = self._gives
        if self._as_it_is and tuple(part.shape[:2]) == self._shape:
            self._batch = part
            if gives is not None:
                gives(part)
            return
        if self._batch is None:
            lend = self._crossings.batches.lend if gives is None else gives.lend
            self._batch = lend((*self._shape, *part.shape[2:]), part.dtype)
        if gives is not None:
            gives.wait_for_place()
        clear_padding(self._batch, micro_batch)
        self.leaving.put(part, micro_batch.of(self._batch), gives)

    def settled(self) -> torch.Tensor:
        """Returns the whole batch, once every part is there."""
        self.leaving.settle()
        assert self._batch is not None
        return self._batch


# ---- memory of whole batches --------------------------------------------------------------------------------------
# Lends memory for whole-batch tensors between stages, in spans of the arena or the device that are reused.

Shape = tuple[int, ...]
Lent = tuple[torch.Tensor, weakref.ref[object]]  # a span as bytes, and an object that lives as long as a view of that tensor


class WholeBatches:
    """Spans. Each is lent as one tensor at a time, until its last view is gone, wherever the model's own forward keeps
    one. If all are lent or too small, a tensor gets its own memory."""

    def __init__(
        self,
        spans: tuple[Span, ...],
        lend_span: Callable[[Span, int], Lent],
        allocate: Callable[[Shape, torch.dtype], torch.Tensor],
        memory: torch.Tensor | None = None,
    ) -> None:
        """Takes two functions: `lend_span` lends one, `allocate` makes a tensor if none is free. `memory`: the device memory
        that the spans are part of."""
        self._spans, self._lend_span, self._allocate, self.memory = list(spans), lend_span, allocate, memory
        self._lent: dict[int, weakref.ref[object]] = {}  # by offset: the object that lives as long as the loan
        self._read: dict[int, list[Event]] = {}  # copies out of a span, which must end before it is written again

    @classmethod
    def in_arena(cls, memory: HostMemory, spans: tuple[Span, ...]) -> WholeBatches:
        def lend_span(span: Span, size: int) -> Lent:
            view = memory.arena.view(span.offset, size)
            return torch.frombuffer(view, dtype=torch.uint8), weakref.ref(view)  # only the tensor's memory holds it

        return cls(spans, lend_span, whole_batch)

    @classmethod
    def on_device(cls, device: Device, spans: tuple[Span, ...]) -> WholeBatches:
        memory = device.empty(max(span.offset + span.size for span in spans))

        def lend_span(span: Span, size: int) -> Lent:
            # A tensor over the same memory with its own storage, which lives as long as the tensor's last view.
            flat = from_dlpack(memory[span.offset : span.offset + size])
            return flat, weakref.ref(flat.untyped_storage())

        def allocate(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
            return device.empty(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

        return cls(spans, lend_span, allocate, memory)

    def lend(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor of the whole batch, zeros or uninitialized, for compute submitted from now on. It lies in the free
        span lent longest ago."""
        size = math.prod(shape) * dtype.itemsize
        for number, span in enumerate(self._spans):
            lent = self._lent.get(span.offset)
            # Small tensors, like those that all rows share, take no span of a whole batch.
            fills = span.size / 2 < size <= span.size
            if fills and (lent is None or lent() is None):
                self._spans.append(self._spans.pop(number))  # taken last: copies out of it get the longest time to end
                for event in self._read.pop(span.offset, []):
                    event.wait()
                flat, self._lent[span.offset] = self._lend_span(span, size)
                return flat.view(dtype).view(shape)
        return self._allocate(shape, dtype)

    def copied(self, part: torch.Tensor, copy: Callable[[torch.Tensor], Event]) -> Event:
        """Notes a copy from what may be a part of a span (contiguous). The next user of the span waits for the copy."""
        if self.memory is None:
            return copy(part)
        place = part.data_ptr() - self.memory.data_ptr()
        for span in self._spans:
            if span.offset <= place < span.offset + span.size:
                size = part.numel() * part.element_size()
                event = copy(self.memory[place : place + size].view(part.dtype).view(part.shape))
                self._read.setdefault(span.offset, []).append(event)
                return event
        return copy(part)


# ---- when each micro-batch computed -------------------------------------------------------------------------------
# Records when each micro-batch of each visit computed, on the device's own time.

_MOST_RECORDED = 1 << 16  # micro-batches of a step that are remembered at most


@dataclass(frozen=True, slots=True)
class ComputedMicroBatch:
    """When one micro-batch computed, in monotonic seconds. `number`: its place in the visit."""

    phase: str
    stage: int
    number: int
    begin: float
    end: float


class Computing:
    """Records a visit's micro-batches. Each begins when its inputs are there, and ends when the next is asked for or the visit
    is left."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._began: Moment | None = None
        self._visit: list[tuple[Moment, Moment]] = []
        self._seen: list[tuple[str, int, int, Moment, Moment]] = []

    def begin(self) -> None:
        self._began = self._device.mark()

    def end(self) -> None:
        if self._began is not None:
            self._visit.append((self._began, self._device.mark()))
            self._began = None

    def leave(self, phase: str, stage: int) -> None:
        self.end()
        room = _MOST_RECORDED - len(self._seen)
        self._seen += [(phase, stage, number, *marks) for number, marks in enumerate(self._visit[: max(0, room)])]
        self._visit.clear()

    def take(self) -> list[ComputedMicroBatch]:
        """Returns the micro-batches recorded since the last call. Waits for those that the device is still computing."""
        seen, self._seen = self._seen, []
        return [ComputedMicroBatch(phase, stage, number, begin(), end()) for phase, stage, number, begin, end in seen]
