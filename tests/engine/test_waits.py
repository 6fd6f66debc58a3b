"""Tests what a run says that compute waited for: only while the device has nothing to do, whatever the host waits for
meanwhile."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from drawn import crossed

from fuyou_cli.spec.plan import Span
from tests.emulated import EmulatedDevice, Rates

from .families import llama
from .rig import Rig, Shape, Subject

BUSY = 0.05  # seconds


def _waited(rig: Rig, cause: str) -> float:
    rig.executor.visits.moves.book_waits()
    return rig.executor.visits.residency.stalls.get(cause, 0.0)


def test_the_host_waits_while_the_device_computes(tmp_path: Path) -> None:
    device = EmulatedDevice()
    with Rig(Subject(llama(), Shape()), tmp_path, device="emulated", home="cpu", opened=device) as rig:
        moves, begin = rig.executor.visits.moves, time.monotonic()
        with moves.waiting("a copy"):
            time.sleep(BUSY)
        rig.executor.visits.residency.wait_until(lambda: time.monotonic() > begin + 2 * BUSY, "weights")
        copy, weights = _waited(rig, "a copy"), _waited(rig, "weights")
        assert BUSY <= copy <= copy + weights <= time.monotonic() - begin
        assert [wait.cause for wait in moves.waits()] == ["a copy", "weights"]
        device.takes(3600)
        with moves.waiting("a copy"):
            time.sleep(BUSY)
        begin = time.monotonic()
        rig.executor.visits.residency.wait_until(lambda: time.monotonic() > begin + BUSY, "weights")
        assert (_waited(rig, "a copy"), _waited(rig, "weights")) == (copy, weights)
        assert moves.waits() == []


def test_compute_waits_for_a_copy_that_the_host_does_not_wait_for(tmp_path: Path) -> None:
    """Counts what the device's own queue waits for as well, from the end of the compute before it."""
    device = EmulatedDevice(pace=Rates(4096 / BUSY, math.inf))
    with Rig(Subject(llama(), Shape()), tmp_path, device="emulated", home="cpu", opened=device) as rig:
        source, target = rig.memory.tensor(Span(offset=0, size=4096), torch.uint8), device.empty(4096)
        begin = time.monotonic()
        device.mark()
        device.takes(BUSY)
        event = device.upload(source, target)  # behind that
        with rig.executor.visits.moves.waiting("a copy"):
            event.wait()
        assert BUSY <= _waited(rig, "a copy") <= time.monotonic() - begin - BUSY


@crossed(2, stays=[True, False], way=[dict(clip=0.5), dict(clip=None), dict(kept="all")])
def test_compute_and_its_waits_fit_into_a_step(stays: bool, way: dict[str, Any], tmp_path: Path) -> None:
    """The device does one thing at a time: it computes, or it waits for one thing."""
    device = EmulatedDevice(pace=Rates(4e7, 4e7), piece=1 << 14)
    subject = Subject(llama(num_hidden_layers=3), Shape(batch=4, micro=1))
    with Rig(subject, tmp_path, device="emulated", home="cpu", opened=device, batch_on_device=stays, **way) as rig:
        computed = 0.0

        def takes() -> None:
            nonlocal computed
            device.takes(0.01)
            computed += 0.01

        rig.executor.between_micro_batches = takes
        begin = time.monotonic()
        rig.run(1)
        device.synchronize()
        seconds = time.monotonic() - begin
        stalls = rig.executor.visits.residency.stalls
        rig.executor.visits.moves.book_waits()
        assert computed > 0.1
        assert computed + sum(stalls.values()) <= seconds, stalls
        assert sum(stalls.values()) > 0
