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

import torch

from .base import Copy, CopyLog
from .cpu import CpuDevice, PastEvent


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


class EmulatedDevice(CpuDevice):
    """Random streams and pinning are the CPU's; memory and copies are its own."""

    name = "emulated"
    separate = True

    def __init__(self) -> None:
        self._allocated = 0
        self._log = CopyLog()
        self._up = _CopyEngine("emulated-up", self._log, up=True)
        self._down = _CopyEngine("emulated-down", self._log, up=False)

    def empty(self, size: int) -> torch.Tensor:
        self._allocated += size
        return torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN in every float format

    def upload(self, host: torch.Tensor, device: torch.Tensor) -> PastEvent:  # beside compute, in order
        return self._up.submit(host, device)

    def download(self, device: torch.Tensor, host: torch.Tensor) -> PastEvent:
        return self._down.submit(device, host)

    def copies(self) -> list[Copy]:
        return [copy for copy in self._log.take() if copy.bytes]

    def peak_memory(self) -> int:
        return self._allocated

    def synchronize(self) -> None:
        self._up.synchronize()
        self._down.synchronize()

    def close(self) -> None:
        self._up.close()
        self._down.close()
