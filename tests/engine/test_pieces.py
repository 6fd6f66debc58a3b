"""Tests that large copies cross in pieces with boundaries first, and wait for what used their target last, and for nothing
else."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.engine.devices import open_device
from fuyou_cli.engine.devices.base import PIECE as LARGE_PIECE
from fuyou_cli.engine.devices.base import Device, Event, in_pieces
from fuyou_cli.planner.schedule import Visit
from tests.emulated import ComputeClock, CopyEngine, CopyEvent, EmulatedDevice

from .comparing import unequal
from .families import llama
from .late import LateDevice
from .rig import Rig, Shape, Subject

PIECE = 1024  # bytes: a block of a tiny model has dozens
COPIED = 40 << 10


@given(st.integers(0, 5000), st.integers(1, 400), st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))
def test_pieces_are_the_whole(count: int, size: int, dtype: torch.dtype) -> None:
    source, target = torch.arange(count).to(dtype), torch.zeros(count, dtype=dtype)
    pieces = in_pieces(source, target, size)
    assert all(part.numel() * part.element_size() <= max(size, dtype.itemsize) for part, _ in pieces)
    for part, place in pieces:
        place.copy_(part)
    assert torch.equal(source, target)


class _Gated(CopyEngine):
    """Stands in its first piece until it is let on; `begun` has what every copy was of."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.standing, self.on = threading.Event(), threading.Event()
        super().__init__("gated", deque(), ComputeClock(), up=True, piece=PIECE)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.begun.append(int(source[0]))
        self.standing.set()
        self.on.wait()
        super().copy(source, target)


def test_a_boundary_waits_for_the_piece_under_way() -> None:
    engine = _Gated()

    def ask(value: int, size: int, *, bulk: bool) -> tuple[torch.Tensor, CopyEvent]:
        target = torch.empty(size, dtype=torch.uint8)
        return target, engine.submit(torch.full_like(target, value), target, begins=0.0, bulk=bulk)

    asked = [ask(1, 4 * PIECE, bulk=True)]
    engine.standing.wait()
    asked += [ask(2, 2 * PIECE, bulk=True), ask(3, 8 * PIECE, bulk=False), ask(4, PIECE, bulk=False)]
    engine.on.set()
    engine.close()
    assert engine.begun == [1, 3, 4, 1, 1, 1, 2, 2]  # boundaries whole, and all of them before the second piece
    assert all(event.done() and target.eq(value).all() for value, (target, event) in enumerate(asked, start=1))


class _Ordered(CopyEngine):
    """Counts the pieces of large copies that had begun when each boundary was asked for, and when it began."""

    def __init__(self, *given: Any, **options: Any) -> None:
        self.pieces = 0
        self.asked, self.begun = list[int](), list[int]()
        super().__init__(*given, **options)

    def submit(self, source: torch.Tensor, target: torch.Tensor, *, begins: float, bulk: bool) -> CopyEvent:
        event = super().submit(source, target, begins=begins, bulk=bulk)
        if not bulk:
            self.asked.append(self.pieces)
        return event

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if source.dim() == 1 and source.dtype == torch.float32:
            self.pieces += 1
        else:
            self.begun.append(self.pieces)
        super().copy(source, target)


def test_in_a_step_no_boundary_is_behind_more_than_one_piece(tmp_path: Path) -> None:
    """Compares with the processor, too: not a bit of the result is other."""
    subject = Subject(llama(), Shape(batch=5))
    with Rig(subject, tmp_path / "cpu", home="cpu") as rig:
        losses, weights = rig.run(2), rig.weights()
    device = EmulatedDevice()
    for name, up in (("_up", True), ("_down", False)):
        getattr(device, name).close()
        setattr(device, name, _Ordered(name, device._log, device._clock, up=up, piece=PIECE))
    with Rig(subject, tmp_path / "pieces", home="cpu", opened=device, device="emulated") as rig:
        assert rig.run(2) == losses
        assert unequal(rig.weights(), weights) == []
    for engine in (device._up, device._down):
        assert isinstance(engine, _Ordered)
        assert engine.pieces > 100 and len(engine.begun) > 10  # checkpoints alone: the batch stays on the device
        behind = [begun - asked for asked, begun in zip(engine.asked, engine.begun, strict=True)]
        assert max(behind) <= 1  # the one under way, or just chosen


class _Behind(LateDevice):
    """Tells behind which point large uploads are asked for: how many visits had been computed by then."""

    def __init__(self) -> None:
        super().__init__()
        self.visits, self.seen = 0, list[tuple[int, int | None]]()  # visits done; and at the point given, None where none is

    def upload(self, host: torch.Tensor, device: torch.Tensor, *, after: Any = None, bulk: bool = False) -> Event:
        if bulk:
            self.seen.append((self.visits, None if after is None else after.visits))
        return super().upload(host, device, after=after, bulk=bulk)

    def compute_end(self) -> Event:
        return _Point(self.visits)


class _Point(Event):
    def __init__(self, visits: int) -> None:
        self.visits = visits


def test_weights_go_up_behind_the_last_reader_of_their_place(tmp_path: Path) -> None:
    """Takes turns at two places: what goes to one while a visit computes with the other waits for the visit before it alone."""
    subject, device = Subject(llama(num_hidden_layers=4), Shape()), _Behind()
    with Rig(subject, tmp_path, opened=device, device="emulated", home="cpu") as rig:

        def after(visit: Visit) -> None:
            device.visits += 1

        rig.executor.after_visit = after
        rig.run(2)
    behind = [(visits, point) for visits, point in device.seen if point is not None]
    assert len(behind) >= 8 and len(device.seen) - len(behind) == 2  # each place's first
    assert all(point < visits for visits, point in behind)


# ---- on a real GPU -----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu() -> Iterator[Device]:
    device = open_device("cuda")
    yield device
    device.close()


def _pinned(size: int, value: int) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8, pin_memory=True)


@pytest.mark.gpu
def test_large_and_small_copies_are_whole_on_a_gpu(gpu: Device) -> None:
    size = 5 * LARGE_PIECE // 2 + 17
    large, small = torch.randint(0, 255, (size,), dtype=torch.uint8).pin_memory(), _pinned(4096, 7)
    there, here = gpu.empty(size), gpu.empty(4096)
    back, small_back = _pinned(size, 0), _pinned(4096, 0)
    up = gpu.upload(large, there, bulk=True)
    gpu.upload(small, here).wait()
    up.wait()
    events = [gpu.download(there, back, bulk=True), gpu.download(here, small_back)]
    for event in events:
        event.synchronize()
        assert event.done()
    assert torch.equal(back, large) and torch.equal(small_back, small)
    moved = gpu.copies()
    assert sorted((copy.bytes, copy.up) for copy in moved) == [(4096, False), (4096, True), (size, False), (size, True)]
    assert all(copy.begin <= copy.end for copy in moved)


@pytest.mark.gpu
@pytest.mark.skipif(os.environ.get("CUDA_LAUNCH_BLOCKING") == "1", reason="compute is over when its launch is")
@pytest.mark.parametrize("bulk", [True, False])
def test_an_upload_waits_for_its_targets_last_reader_on_a_gpu(bulk: bool, gpu: Device) -> None:
    host, place = _pinned(4096, 1), gpu.empty(4096)
    read = gpu.compute_end()
    torch.cuda._sleep(2_000_000_000)  # about a second of compute
    later = gpu.compute_end()
    gpu.upload(host, place, after=read, bulk=bulk).synchronize()
    assert not later.done()
    gpu.upload(host, place, bulk=bulk).synchronize()  # behind all that was submitted
    assert later.done()


@pytest.mark.gpu
def test_a_boundary_does_not_wait_for_a_large_copy_on_a_gpu(gpu: Device) -> None:
    large, small = _pinned(40 * LARGE_PIECE, 1), _pinned(4096, 2)
    there, here = gpu.empty(large.numel()), gpu.empty(4096)
    event = gpu.upload(large, there, bulk=True)
    gpu.upload(small, here).synchronize()
    assert not event.done()  # of 40 pieces, no more than one was before it
    event.synchronize()
