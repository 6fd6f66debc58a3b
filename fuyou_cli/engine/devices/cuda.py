"""A CUDA device: two copy streams beside the compute stream, events between them, the arena pinned.

Correct first: uploads wait for compute that may still read their target, downloads wait for compute that produces their
source. Host memory is registered with cudaHostRegister, because torch's own pinned allocator rounds sizes up to powers
of two. What no GPU has confirmed yet is listed in CHANGELOG.md.
"""

from __future__ import annotations

import torch

from ...core.errors import FuyouError


class CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

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

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.torch_device)

    def upload(self, host: torch.Tensor, device: torch.Tensor) -> CudaEvent:
        self._up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._up):
            device.copy_(host, non_blocking=True)
        device.record_stream(self._up)
        return CudaEvent(self._up)

    def download(self, device: torch.Tensor, host: torch.Tensor) -> CudaEvent:
        self._down.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._down):
            host.copy_(device, non_blocking=True)
        device.record_stream(self._down)
        return CudaEvent(self._down)

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
