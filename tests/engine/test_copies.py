"""Copies of a device with memory of its own: when they ran, and that waiting for them is told by cause."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fuyou_cli.engine.devices import open_device
from fuyou_cli.planner.device import BOUNDARIES_ACROSS, GRADIENTS_ACROSS, WEIGHTS_UP
from fuyou_cli.planner.schedule import Visit

from .families import llama
from .rig import Rig, Shape, Subject

HEAVY = 256 << 20  # bytes: tens of milliseconds of copying, where a tiny model's weights take microseconds


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(llama(num_hidden_layers=3), Shape())


def test_weights_and_gradients_are_among_the_copies(subject: Subject, tmp_path: Path) -> None:
    item = 4  # bytes, float32
    params = sum(stage.params for stage in subject.spec.stages)
    with Rig(subject, tmp_path, device="emulated", clip=0.5) as rig:
        for number, (ids, labels) in enumerate(subject.batches(2), start=1):
            rig.device.copies()
            rig.step(ids, labels, number)
            copies = rig.device.copies()
            assert all(copy.begin <= copy.end and copy.bytes > 0 for copy in copies)
            up, down = (sum(copy.bytes for copy in copies if copy.up == way) for way in (True, False))
            assert up >= item * params and down >= item * params
        rig.executor.drain()
        rig.device.synchronize()
        rig.device.copies()
        assert rig.device.copies() == []  # told once


def test_waiting_for_copies_is_told_by_cause(subject: Subject, tmp_path: Path) -> None:
    """A large copy in the queue before weights and gradients, each way: what it takes is waited for, and said."""
    heavy = torch.zeros(HEAVY, dtype=torch.uint8)
    with Rig(subject, tmp_path, device="emulated", clip=0.5) as rig:
        target = rig.device.empty(HEAVY)
        batches = subject.batches(2)
        rig.step(*next(batches), 1)
        rig.device.copies()
        before = dict(rig.executor.residency.stalls)

        def crowd(visit: Visit) -> None:
            if (visit.phase, visit.stage) == ("forward", 1):
                rig.device.upload(heavy, target)
            if visit.index == len(rig.executor.schedule.visits) - 2:
                rig.device.download(target, heavy)

        rig.executor.after_visit = crowd
        rig.step(*next(batches), 2)
        for cause in (WEIGHTS_UP, BOUNDARIES_ACROSS, GRADIENTS_ACROSS):  # how much of it depends on what runs beside it
            assert rig.executor.residency.stalls[cause] > before.get(cause, 0.0), cause
        rig.executor.drain()


def test_on_device_cpu_nothing_is_copied(subject: Subject, tmp_path: Path) -> None:
    with Rig(subject, tmp_path, device="cpu") as rig:
        rig.run(2)
        assert open_device("cpu").copies() == rig.device.copies() == []
        assert not {WEIGHTS_UP, BOUNDARIES_ACROSS, GRADIENTS_ACROSS} & set(rig.executor.residency.stalls)
