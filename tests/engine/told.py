"""An emulated device that knows which memory is its own: what it gave, what it was told, and what was computed with that."""

from __future__ import annotations

import bisect
from typing import Any

import torch

from fuyou_cli.engine.devices.base import Device, Event
from tests.emulated import EmulatedDevice


class Told(EmulatedDevice):
    def __init__(self) -> None:
        super().__init__()
        self._given: list[tuple[int, int]] = []  # addresses, in order
        self._computed: dict[int, torch.Tensor] = {}  # kept, so that no address is used twice

    def empty(self, size: int) -> torch.Tensor:
        return self.mine(super().empty(size))

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        return self.mine(super().empty_like(host))

    def told(self, host: torch.Tensor) -> torch.Tensor:
        return self.mine(super().told(host))

    upload_all = Device.upload_all

    def upload(self, host: torch.Tensor, device: torch.Tensor, **how: Any) -> Event:
        assert self.owns(device) and not self.owns(host)
        return super().upload(host, device, **how)

    def mine(self, tensor: torch.Tensor) -> torch.Tensor:
        begin = tensor.untyped_storage().data_ptr()
        bisect.insort(self._given, (begin, begin + tensor.untyped_storage().nbytes()))
        self._computed[begin] = tensor
        return tensor

    def computes(self, tensor: torch.Tensor) -> None:
        if not self.owns(tensor):
            self._computed[tensor.untyped_storage().data_ptr()] = tensor

    def owns(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        place = bisect.bisect_right(self._given, (address, 1 << 62)) - 1
        return address in self._computed or (place >= 0 and address < self._given[place][1])
