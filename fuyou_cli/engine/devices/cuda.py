"""A CUDA device: two copy streams beside the compute stream, events between them, the arena pinned.

Correct first: uploads wait for compute that may still read their target, downloads wait for compute that produces their
source. Host memory is registered with cudaHostRegister, because torch's own pinned allocator rounds sizes up to powers
of two. What no GPU has confirmed yet is listed in CHANGELOG.md.
"""

from __future__ import annotations

import time
from collections import deque

import torch

from ...core.errors import FuyouError
from .base import MOST_COPIES, Copy


class CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def seconds_after(self, earlier: CudaEvent) -> float:
        """Both have passed."""
        return float(earlier._event.elapsed_time(self._event)) / 1000

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())


class CudaDevice:
    name = "cuda"
    separate = True

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise FuyouError(
                "no CUDA device is usable by this torch build",
                hint="run `fuyou doctor`, or set offload.device=cpu",
            )
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._up = torch.cuda.Stream()
        self._down = torch.cuda.Stream()
        self._pinned: list[int] = []
        self._copies: deque[tuple[bool, CudaEvent, CudaEvent, int]] = deque(maxlen=MOST_COPIES)  # up, from, to, bytes
        self._clock = torch.cuda.Stream()  # never has work: what is recorded there passes at once
        self._set_clock()

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.torch_device)

    def upload(self, host: torch.Tensor, device: torch.Tensor) -> CudaEvent:
        self._up.wait_stream(torch.cuda.current_stream())
        begin = CudaEvent(self._up)
        with torch.cuda.stream(self._up):
            device.copy_(host, non_blocking=True)
        device.record_stream(self._up)
        end = CudaEvent(self._up)
        self._copies.append((True, begin, end, host.numel() * host.element_size()))
        return end

    def download(self, device: torch.Tensor, host: torch.Tensor) -> CudaEvent:
        self._down.wait_stream(torch.cuda.current_stream())
        begin = CudaEvent(self._down)
        with torch.cuda.stream(self._down):
            host.copy_(device, non_blocking=True)
        device.record_stream(self._down)
        end = CudaEvent(self._down)
        self._copies.append((False, begin, end, host.numel() * host.element_size()))
        return end

    def _set_clock(self) -> None:
        """Which moment of the host's clock one of the device's is. Set often: the time since is in single precision."""
        self._zero = CudaEvent(self._clock)
        self._zero.synchronize()
        self._zero_at = time.monotonic()

    def copies(self) -> list[Copy]:
        found, going = [], []
        for copy in self._copies:
            up, begin, end, size = copy
            if not end.done():
                going.append(copy)
                continue
            first, last = (self._zero_at + event.seconds_after(self._zero) for event in (begin, end))
            found.append(Copy(up=up, begin=first, end=last, bytes=size))
        self._copies.clear()
        self._copies.extend(going)
        self._set_clock()
        return found

    def pin(self, host: torch.Tensor) -> None:
        if host.numel() == 0:
            return
        status = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel() * host.element_size(), 0))
        if status:
            raise FuyouError(
                f"cannot pin {host.numel() * host.element_size()} bytes of host memory (CUDA error {status})",
                hint="lower offload.max_memory.cpu: `fuyou doctor` says how much can be pinned (on WSL2 half of its memory). "
                "The locked-memory limit (ulimit -l) is not asked",
            )
        self._pinned.append(host.data_ptr())

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)  # seeds CUDA generators as well

    def random_state(self) -> object:
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.torch_device)

    def restore_random_state(self, state: object) -> None:
        assert isinstance(state, tuple)
        torch.set_rng_state(state[0])
        torch.cuda.set_rng_state(state[1], self.torch_device)

    def peak_memory(self) -> int:
        return torch.cuda.max_memory_reserved(self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        self.synchronize()
        for pointer in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(pointer)
        self._pinned.clear()
