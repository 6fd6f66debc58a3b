"""Emulated devices whose copies are as late, or as early, as they may be, and one whose compute is late.

Each copy is made when somebody waits for it, or for one behind it in the same direction (large copies and others are in no
order), and not a moment earlier; or the moment it is asked for. Who forgets to wait, or changes a
source too early, computes with NaN or with what came later beside the one; who asks for a copy to where another's result has
not been taken yet, with what came later beside the other. Every time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuyou_cli.engine.devices.base import Device, Event, Squares, ValueRun, squares_of
from tests.emulated import EmulatedDevice, poison

ASKED = 20  # times that the host asks in vain whether something is over


class _LateCopies:
    """Makes copies of one direction, in order."""

    def __init__(self) -> None:
        self.waiting: list[tuple[_LateCopy, torch.Tensor, torch.Tensor]] = []
        self.in_vain = 0  # times that a copy is asked whether it is over before that counts as waiting

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


class _LateCopy(Event):
    def __init__(self, copies: _LateCopies) -> None:
        self._copies, self.made, self._asked = copies, False, 0

    def wait(self) -> None:
        self._copies.run_until(self)

    def synchronize(self) -> None:
        self._copies.run_until(self)

    def done(self) -> bool:
        self._asked += 1
        if self._asked > self._copies.in_vain:
            self._copies.run_until(None if self._copies.in_vain else self)
        return self.made


class _LateSquares:
    """Computes squares of what is there when somebody asks for them."""

    def __init__(self, flat: torch.Tensor, runs: Sequence[ValueRun]) -> None:
        self._flat, self._runs = flat, runs
        self._values: list[float] | None = None

    def done(self) -> bool:
        self.result()
        return True

    def result(self) -> list[float]:
        if self._values is None:
            self._values = squares_of(self._flat, self._runs)
        return self._values


class LateDevice(EmulatedDevice):
    download_all, upload_all = Device.download_all, Device.upload_all

    def __init__(self) -> None:
        super().__init__()
        self._late_up, self._late_down, self._bulk_up, self._bulk_down = (_LateCopies() for _ in range(4))

    def squares(self, flat: torch.Tensor, runs: Sequence[ValueRun], lanes: torch.Tensor) -> Squares:
        return _LateSquares(flat, runs)

    def upload(self, host: torch.Tensor, device: torch.Tensor, *, after: Event | None = None, bulk: bool = False) -> Event:
        return (self._bulk_up if bulk else self._late_up).submit(host, device)

    def download(self, device: torch.Tensor, host: torch.Tensor, *, bulk: bool = False) -> Event:
        return (self._bulk_down if bulk else self._late_down).submit(device, host)

    def synchronize(self) -> None:
        for copies in (self._late_up, self._late_down, self._bulk_up, self._bulk_down):
            copies.run_until(None)

    @property
    def under_way(self) -> int:
        """Returns the copies nobody has waited for yet."""
        return sum(len(c.waiting) for c in (self._late_up, self._late_down, self._bulk_up, self._bulk_down))


class ReluctantDevice(LateDevice):
    """Lets what comes down be later still: nobody learns by looking once that it has arrived."""

    def __init__(self) -> None:
        super().__init__()
        self._late_down.in_vain = ASKED


class EarlyDevice(EmulatedDevice):
    download_all, upload_all = Device.download_all, Device.upload_all

    def upload(self, host: torch.Tensor, device: torch.Tensor, *, after: Event | None = None, bulk: bool = False) -> Event:
        device.copy_(host)
        return Event()

    def download(self, device: torch.Tensor, host: torch.Tensor, *, bulk: bool = False) -> Event:
        host.copy_(device)
        return Event()


def late(device: type[EmulatedDevice] = LateDevice) -> dict[str, Any]:
    """Returns how to ask a rig for a late device, or for another of this file."""
    return {"device": "emulated", "opened": device}


class LaggingDevice(EmulatedDevice):
    """Its compute lags behind: that it waits for an upload says nothing to the host. What goes up has to stay as it is until
    the host has waited for that upload, or for a result of compute behind it; who changes it before is named."""

    upload_all = Device.upload_all

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[_Lagging] = []
        self.uploads = 0  # so far

    def upload(self, host: torch.Tensor, device: torch.Tensor, *, after: Event | None = None, bulk: bool = False) -> Event:
        device.copy_(host)
        self.under_way.append(_Lagging(self, host, bulk))
        return self.under_way[-1]

    def download(self, device: torch.Tensor, host: torch.Tensor, *, bulk: bool = False) -> Event:
        # behind compute, and so behind uploads that compute has waited for: these may come from where it goes
        self.over([upload for upload in self.under_way if upload.waited and upload.overlaps(host)])
        host.copy_(device)
        return _Behind(self)

    def squares(self, flat: torch.Tensor, runs: Sequence[ValueRun], lanes: torch.Tensor) -> Squares:
        return _SquaresBehind(self, squares_of(flat, runs))

    def synchronize(self) -> None:
        self.over(self.under_way)

    def over(self, uploads: Sequence[_Lagging]) -> None:
        for upload in list(uploads):
            if upload in self.under_way:
                self.under_way.remove(upload)
                assert torch.equal(upload.source, upload.before), f"what went up was changed meanwhile: {upload.source.shape}"


class _Seen(Event):
    """Tells what the host sees late: when it asks often, or waits."""

    asked = 0

    def done(self) -> bool:
        self.asked += 1
        if self.asked > ASKED:
            self.synchronize()
        return self.asked > ASKED


class _Lagging(_Seen):
    def __init__(self, device: LaggingDevice, host: torch.Tensor, bulk: bool) -> None:
        self._device, self.bulk, self.waited = device, bulk, False
        self._number = device.uploads = device.uploads + 1
        self.source = host.detach().as_strided((host.numel(),), (1,)).view(torch.uint8)
        self.before = self.source.clone()

    def overlaps(self, host: torch.Tensor) -> bool:
        begin, end = host.data_ptr(), host.data_ptr() + host.numel() * host.element_size()
        return begin < self.source.data_ptr() + self.source.numel() and self.source.data_ptr() < end

    def wait(self) -> None:
        self.waited = True

    def synchronize(self) -> None:
        # Those of its kind before it are over as well, also where a download into its source has settled itself already.
        uploads = self._device.under_way
        self._device.over([upload for upload in uploads if upload._number <= self._number and upload.bulk == self.bulk])
        self.asked = ASKED + 1


class _Behind(_Seen):
    def __init__(self, device: LaggingDevice) -> None:
        self._device = device
        self._before = [upload for upload in device.under_way if upload.waited]

    def synchronize(self) -> None:
        self._device.over(self._before)
        self.asked = ASKED + 1


class _SquaresBehind:
    def __init__(self, device: LaggingDevice, values: list[float]) -> None:
        self._behind, self._values = _Behind(device), values

    def done(self) -> bool:
        return self._behind.done()

    def result(self) -> list[float]:
        self._behind.synchronize()
        return self._values
