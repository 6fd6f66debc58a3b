"""An emulated accelerator: memory of its own (other CPU tensors) and copy engines of its own (one thread each way).

It exists so that everything about a separate device is exercised without one: uploads and downloads really run beside
compute, each direction in order and in no order with the other, and reading a copy before its event is a real bug with real
consequences. Device memory starts as NaN bytes, and so does the target of a copy from the moment it is asked for, so that
whoever does not wait for it is seen.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref

import torch

from ...core.units import gib
from .base import Copy, CopyLog, Event
from .cpu import CpuDevice, PastEvent
from .pinned import STAGING, PinnedMemory, Staging


class CopyEvent(PastEvent):
    """Set by a copy engine when everything submitted to it before has been copied."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self.error: RuntimeError | None = None

    def wait(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        self._passed.wait()
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        return self._passed.is_set()


class _CopyEngine:
    """One direction: copies in the order they were asked for, on a thread."""

    def __init__(self, name: str, log: CopyLog, *, up: bool) -> None:
        self._log, self._up = log, up
        self._work: queue.SimpleQueue[tuple[torch.Tensor, torch.Tensor, CopyEvent] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._copy, name=name, daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        while (item := self._work.get()) is not None:
            source, target, event = item
            begin = time.monotonic()
            try:
                target.copy_(source)
            except RuntimeError as error:  # shape or dtype mismatch: re-raised by whoever waits
                event.error = error
            size = source.numel() * source.element_size()
            self._log.add(Copy(up=self._up, begin=begin, end=time.monotonic(), bytes=size))
            event._passed.set()

    def submit(self, source: torch.Tensor, target: torch.Tensor) -> CopyEvent:
        event = CopyEvent()
        poison(target)
        self._work.put((source, target, event))
        return event

    def synchronize(self) -> None:
        marker = torch.empty(0)
        self.submit(marker, marker).synchronize()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()


def poison(target: torch.Tensor) -> None:
    """What computes with it before the copy has arrived gets NaN, or ids of no token."""
    target.fill_(torch.nan if target.is_floating_point() else True if target.dtype == torch.bool else -1)


class _Memory:
    """Bytes of device memory that are alive, as a device's allocator counts them: no more than `limit`."""

    def __init__(self, limit: int | None) -> None:
        self.limit, self.live, self.peak = limit, 0, 0

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if self.limit is not None and self.live + size > self.limit:
            left = f"{gib(self.live)} of {gib(self.limit)} are in use"
            raise torch.OutOfMemoryError(f"emulated device out of memory. Tried to allocate {gib(size)}; {left}")
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._give_back, size).atexit = False
        return tensor

    def _give_back(self, size: int) -> None:
        self.live -= size


class EmulatedDevice(CpuDevice):
    """Random streams are the CPU's; memory and copies are its own. What compute allocates for itself is not counted. `memory`:
    bytes that may be in use. `pinnable`: bytes of the host's that may be registered at a time (None: all)."""

    name = "emulated"
    separate = True

    def __init__(self, memory: int | None = None, pinnable: int | None = None) -> None:
        self._memory = _Memory(memory)
        self._pinnable = pinnable
        self._host = PinnedMemory(self._register, lambda address: None)
        self._staging: list[Staging] = []  # up and down, where not all of the host's memory could be pinned
        self._log = CopyLog()
        self._up = _CopyEngine("emulated-up", self._log, up=True)
        self._down = _CopyEngine("emulated-down", self._log, up=False)

    def empty(self, size: int) -> torch.Tensor:
        return self._memory.take(torch.full((size,), 0xFF, dtype=torch.uint8))  # NaN in every float format

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        return self._memory.take(super().empty_like(host))

    def upload(self, host: torch.Tensor, device: torch.Tensor) -> Event:  # beside compute, in order
        if self._host.refuses(host):
            poison(device)
            return self._staging[0].submit(host, device, self._up.submit)
        return self._up.submit(host, device)

    def download(self, device: torch.Tensor, host: torch.Tensor) -> Event:
        if self._host.refuses(host):
            poison(host)
            return self._staging[1].submit(device, host, self._down.submit)
        return self._down.submit(device, host)

    def pin(self, host: torch.Tensor) -> int:
        refused = self._host.pin(host)
        for up in (True, False) if refused and not self._staging else ():
            buffers = [torch.empty(STAGING, dtype=torch.uint8) for _ in range(2)]
            self._staging.append(Staging("staging-up" if up else "staging-down", buffers, up=up))
        return refused

    def _register(self, address: int, size: int) -> bool:
        if self._pinnable is None:
            return True
        if size > self._pinnable:
            return False
        self._pinnable -= size
        return True

    def copies(self) -> list[Copy]:
        return [copy for copy in self._log.take() if copy.bytes]

    def memory(self) -> int:
        return self._memory.live

    def peak_memory(self) -> int:
        return self._memory.peak

    def free_memory(self) -> int | None:
        return None if self._memory.limit is None else self._memory.limit - self._memory.live

    def synchronize(self) -> None:
        for staging in self._staging:
            staging.synchronize()
        self._up.synchronize()
        self._down.synchronize()

    def close(self) -> None:
        for staging in self._staging:
            staging.close()
        self._up.close()
        self._down.close()
