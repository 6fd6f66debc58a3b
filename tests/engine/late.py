"""Emulated devices whose copies are as late, or as early, as they may be: each is made when somebody waits for it, or for one
behind it in the same direction (large copies and others are in no order), and not a moment earlier; or the moment it is asked
for. Who forgets to wait, or changes a
source too early, computes with NaN or with what came later beside the one; who asks for a copy to where another's result has
not been taken yet, with what came later beside the other. Every time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fuyou_cli.engine.devices.base import Event, Run, Squares
from fuyou_cli.engine.devices.cpu import PastEvent, squares_of
from fuyou_cli.engine.devices.emulated import EmulatedDevice, poison

from . import rig as rigs


class _LateCopies:
    """One direction, in order."""

    def __init__(self) -> None:
        self.waiting: list[tuple[_LateCopy, torch.Tensor, torch.Tensor]] = []

    def submit(self, source: torch.Tensor, target: torch.Tensor) -> _LateCopy:
        poison(target)
        event = _LateCopy(self)
        self.waiting.append((event, source, target))
        return event

    @torch.no_grad()
    def run_until(self, event: _LateCopy | None) -> None:
        while self.waiting and not (event and event.made):
            made, source, target = self.waiting.pop(0)
            target.copy_(source)
            made.made = True


class _LateCopy(PastEvent):
    def __init__(self, copies: _LateCopies) -> None:
        self._copies, self.made = copies, False

    def wait(self) -> None:
        self._copies.run_until(self)

    def synchronize(self) -> None:
        self._copies.run_until(self)

    def done(self) -> bool:
        self._copies.run_until(self)
        return True


class _LateSquares:
    """Of what is there when somebody asks for them."""

    def __init__(self, flat: torch.Tensor, runs: Sequence[Run]) -> None:
        self._flat, self._runs = flat, runs
        self._values: list[float] | None = None

    def done(self) -> bool:
        self.values()
        return True

    def values(self) -> list[float]:
        if self._values is None:
            self._values = squares_of(self._flat, self._runs)
        return self._values


class LateDevice(EmulatedDevice):
    def __init__(self) -> None:
        super().__init__()
        self._late_up, self._late_down, self._bulk_up, self._bulk_down = (_LateCopies() for _ in range(4))

    def squares(self, flat: torch.Tensor, runs: Sequence[Run], lanes: torch.Tensor) -> Squares:
        return _LateSquares(flat, runs)

    def upload(self, host: torch.Tensor, device: torch.Tensor, *, after: Event | None = None, bulk: bool = False) -> PastEvent:
        return (self._bulk_up if bulk else self._late_up).submit(host, device)

    def download(self, device: torch.Tensor, host: torch.Tensor, *, bulk: bool = False) -> PastEvent:
        return (self._bulk_down if bulk else self._late_down).submit(device, host)

    def synchronize(self) -> None:
        for copies in (self._late_up, self._late_down, self._bulk_up, self._bulk_down):
            copies.run_until(None)

    @property
    def under_way(self) -> int:
        """Copies nobody has waited for yet."""
        return sum(len(c.waiting) for c in (self._late_up, self._late_down, self._bulk_up, self._bulk_down))


class EarlyDevice(EmulatedDevice):
    def upload(self, host: torch.Tensor, device: torch.Tensor, *, after: Event | None = None, bulk: bool = False) -> PastEvent:
        device.copy_(host)
        return PastEvent()

    def download(self, device: torch.Tensor, host: torch.Tensor, *, bulk: bool = False) -> PastEvent:
        host.copy_(device)
        return PastEvent()


def make_late(monkeypatch: pytest.MonkeyPatch, device: type[EmulatedDevice] = LateDevice) -> dict[str, Any]:
    """From now on an emulated device is a late one, or another of this file; how to ask for it."""
    monkeypatch.setattr(rigs, "open_device", lambda kind: device())
    return {"device": "emulated"}
