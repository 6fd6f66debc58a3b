"""Tests copies of a device with memory of its own: when they ran, and that waiting for them is told by cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import crossed

from fuyou_cli.engine.devices import open_device
from fuyou_cli.planner.bound import copied_bytes
from fuyou_cli.planner.costs import Costs
from fuyou_cli.planner.device import BOUNDARIES_ACROSS, GRADIENTS_ACROSS, WEIGHTS_UP
from fuyou_cli.planner.schedule import Visit

from .families import llama
from .rig import HARDWARE, Rig, Shape, Subject

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
    """Queues a large copy before weights and gradients, each way: what it takes is waited for, and said."""
    heavy = torch.zeros(HEAVY, dtype=torch.uint8)
    with Rig(subject, tmp_path, device="emulated", clip=0.5) as rig:
        target = rig.device.empty(HEAVY)
        batches = subject.batches(2)
        rig.step(*next(batches), 1)
        rig.device.copies()
        before = dict(rig.executor.visits.residency.stalls)

        def crowd(visit: Visit) -> None:
            if (visit.phase, visit.stage) == ("forward", 1):
                rig.device.upload(heavy, target)
            if visit.index == len(rig.executor.visits.schedule.visits) - 2:
                rig.device.download(target, heavy)

        rig.executor.after_visit = crowd
        rig.step(*next(batches), 2)
        for cause in (WEIGHTS_UP, BOUNDARIES_ACROSS, GRADIENTS_ACROSS):  # how much of it depends on what runs beside it
            assert rig.executor.visits.residency.stalls[cause] > before.get(cause, 0.0), cause
        rig.executor.drain()


def test_on_device_cpu_nothing_is_copied(subject: Subject, tmp_path: Path) -> None:
    with Rig(subject, tmp_path, device="cpu") as rig:
        rig.run(2)
        assert open_device("cpu").copies() == rig.device.copies() == []
        assert not {WEIGHTS_UP, BOUNDARIES_ACROSS, GRADIENTS_ACROSS} & set(rig.executor.visits.residency.stalls)


def _counted(rig: Rig) -> tuple[int, int]:
    """Counts bytes of one step that go up and come down, once there has been one before."""
    (first, second), counts = rig.subject.batches(2), list[int]()
    rig.step(*first, 1)
    rig.executor.drain()
    rig.device.copies()
    rig.step(*second, 2, last=True)
    rig.executor.drain()
    rig.device.synchronize()
    copies = rig.device.copies()
    counts += [sum(copy.bytes for copy in copies if copy.up == way) for way in (True, False)]
    return counts[0], counts[1]


@crossed(
    2,
    way=[dict(), dict(home="cpu"), dict(home="cpu", kept="all"), dict(home="cpu", clip=None)],
    case=[
        (Shape(batch=5), False), (Shape(dtype="bfloat16", batch=6), True), (Shape(vocabulary=40), True),
        (Shape(dtype="bfloat16", vocabulary=40), False),
    ],
)  # fmt: skip
def test_a_step_copies_what_its_plan_says(case: tuple[Shape, bool], way: dict[str, Any], tmp_path: Path) -> None:
    """Of a batch that stays on the device, to the byte; of kept outputs at most, for numbers and missing rows do not cross. One
    that is handed on by way of the host takes ids and targets with it as well, which a plan leaves out: they are small."""
    shape, tied = case
    subject = Subject(llama(tie_word_embeddings=tied), shape)
    moved = dict[bool, tuple[int, int]]()
    for stays in (True, False):
        with Rig(subject, tmp_path / str(stays), device="emulated", batch_on_device=stays, **way) as rig:
            charged = copied_bytes(
                Costs.of(rig.spec, HARDWARE, rig.plan), rig.executor.visits.schedule.visits, stages=rig.plan.stages
            )
            up, down = _counted(rig)
        ids = 8 * shape.batch * shape.tokens * (not stays)
        up -= 2 * ids * sum(stage.kind == "embedding" for stage in subject.spec.stages) + ids * (not shape.vocabulary)
        moved[stays] = up, down
        assert charged[0] - up == charged[1] - down
        assert up == charged[0] or ("kept" in way and 0.9 * charged[0] < up < charged[0])
    boundary = subject.spec.boundary_bytes_per_token * subject.numerics.tokens
    stages = sum(stage.keeps_input for stage in subject.spec.stages)
    assert moved[False][0] - moved[True][0] >= 2 * stages * boundary  # in forward, and gradients
    assert moved[False][1] - moved[True][1] >= 2 * stages * boundary
