"""Stores outputs of operators with their stage's boundary, in the arena or on the ssd."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..boundaries import Boundaries
from ..devices.base import Device, Event
from ..host_memory import HostMemory
from .resting import Resting, Views


class Swap:
    """Implements `Place`. A separate device copies outputs to the host and back while it computes. On device cpu backward uses
    them where they are."""

    direct = False

    def __init__(self, stage: int, *, boundaries: Boundaries, memory: HostMemory, device: Device) -> None:
        self.waits = device.separate
        self._stage, self._boundaries, self._device = stage, boundaries, device
        self._views = Views(memory.whole)

    def room(self, micro_batch: int, operator: int) -> int:
        return self._boundaries.output_size(self._stage, micro_batch, operator)

    def there(self, micro_batch: int, operator: int, resting: Resting) -> torch.Tensor:
        return self._views.at(self._boundaries.output_begin(self._stage, micro_batch, operator), resting)

    def put(self, value: torch.Tensor, there: torch.Tensor) -> Event | None:
        if self._device.separate:
            return self._device.download(value, there)
        there.copy_(value)
        return None

    def put_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Event]:
        return self._device.download_all(pairs)

    def arriving(self, there: torch.Tensor) -> torch.Tensor:
        return self._device.empty_like(there) if self._device.separate else there

    def bring_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Event]:
        return self._device.upload_all(pairs)
