"""Device cpu: host memory is device memory. Nothing is copied and every event has already passed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...spec.model import Dtype
from ...swap.kernels import sum_squares
from .base import Copy, Event, Run, Squares


class PastEvent:
    """An event of work that was done before the call returned."""

    def wait(self) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def done(self) -> bool:
        return True


class KnownSquares:
    """Of a device that computes them before the call returns."""

    def __init__(self, values: list[float]) -> None:
        self._values = values

    def done(self) -> bool:
        return True

    def values(self) -> list[float]:
        return self._values


def squares_of(flat: torch.Tensor, runs: Sequence[Run]) -> list[float]:
    """By the library, on this thread and without the GIL: a fixed tree per run."""
    memory, item = flat.view(torch.uint8).numpy().data, flat.element_size()
    dtype: Dtype = "bfloat16" if flat.dtype == torch.bfloat16 else "float32"
    return [sum_squares(memory[first * item : (first + count) * item], dtype)[0] for first, count in runs]


class CpuDevice:
    name = "cpu"
    torch_device = torch.device("cpu")
    separate = False

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype)

    def upload(self, host: torch.Tensor, device: torch.Tensor, *, after: Event | None = None, bulk: bool = False) -> Event:
        device.copy_(host)
        return PastEvent()

    def download(self, device: torch.Tensor, host: torch.Tensor, *, bulk: bool = False) -> Event:
        host.copy_(device)
        return PastEvent()

    def computed(self) -> Event:
        return PastEvent()

    def squares(self, flat: torch.Tensor, runs: Sequence[Run], lanes: torch.Tensor) -> Squares:
        return KnownSquares(squares_of(flat, runs))

    def pin(self, host: torch.Tensor) -> int:
        return 0

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a stack for every backend not started: 0.3 ms

    def random_state(self) -> object:
        return torch.get_rng_state()

    def restore_random_state(self, state: object) -> None:
        assert isinstance(state, torch.Tensor)
        torch.set_rng_state(state)

    def copies(self) -> list[Copy]:
        return []

    def memory(self) -> int:
        return 0

    def peak_memory(self) -> int:
        return 0

    def free_memory(self) -> int | None:
        return None

    def synchronize(self) -> None:
        return None

    def close(self) -> None:
        return None
