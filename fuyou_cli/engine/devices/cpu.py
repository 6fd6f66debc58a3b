"""Device cpu: host memory is device memory. Nothing is copied and every event has already passed."""

from __future__ import annotations

import torch

from .base import Copy


class PastEvent:
    """An event of work that was done before the call returned."""

    def wait(self) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def done(self) -> bool:
        return True


class CpuDevice:
    name = "cpu"
    torch_device = torch.device("cpu")
    separate = False

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def upload(self, host: torch.Tensor, device: torch.Tensor) -> PastEvent:
        device.copy_(host)
        return PastEvent()

    def download(self, device: torch.Tensor, host: torch.Tensor) -> PastEvent:
        host.copy_(device)
        return PastEvent()

    def pin(self, host: torch.Tensor) -> None:
        return None

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def random_state(self) -> object:
        return torch.get_rng_state()

    def restore_random_state(self, state: object) -> None:
        assert isinstance(state, torch.Tensor)
        torch.set_rng_state(state)

    def copies(self) -> list[Copy]:
        return []

    def peak_memory(self) -> int:
        return 0

    def synchronize(self) -> None:
        return None

    def close(self) -> None:
        return None
