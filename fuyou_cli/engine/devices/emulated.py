"""An emulated accelerator: memory of its own (other CPU tensors) and a copy engine of its own (one thread).

It exists so that everything about a separate device is exercised without one: uploads and downloads really run beside
compute, in order, and reading a copy before its event is a real bug with real consequences. Device memory starts as NaN
bytes, so compute that does not wait for its upload is seen.
"""

from __future__ import annotations

import queue
import threading

import torch

from .cpu import CpuDevice, PastEvent


class CopyEvent(PastEvent):
    """Set by the copy thread when everything submitted before it has been copied."""

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


class EmulatedDevice(CpuDevice):
    """Random streams and pinning are the CPU's; memory and copies are its own."""

    name = "emulated"
    separate = True

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[torch.Tensor, torch.Tensor, CopyEvent] | None] = queue.SimpleQueue()
        self._allocated = 0
        self._thread = threading.Thread(target=self._copy, name="emulated-copy", daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        while (item := self._work.get()) is not None:
            source, target, event = item
            try:
                target.copy_(source)
            except RuntimeError as error:  # shape or dtype mismatch: re-raised by whoever waits
                event.error = error
            event._passed.set()

    def _submit(self, source: torch.Tensor, target: torch.Tensor) -> CopyEvent:
        event = CopyEvent()
        self._work.put((source, target, event))
        return event

    def empty(self, size: int) -> torch.Tensor:
        self._allocated += size
        return torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN in every float format

    def upload(self, host: torch.Tensor, device: torch.Tensor) -> CopyEvent:  # beside compute, in order
        return self._submit(host, device)

    def download(self, device: torch.Tensor, host: torch.Tensor) -> CopyEvent:
        return self._submit(device, host)

    def peak_memory(self) -> int:
        return self._allocated

    def synchronize(self) -> None:
        event = CopyEvent()
        marker = torch.empty(0)
        self._work.put((marker, marker, event))
        event.synchronize()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()
