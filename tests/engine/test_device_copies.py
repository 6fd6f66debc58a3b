"""Tests copies of a device with memory of its own: when they ran, and that waiting for them is told by cause."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import crossed

from fuyou_cli.engine.devices import open_device
from fuyou_cli.planner.bound import copied_bytes
from fuyou_cli.planner.costs import Costs, staged_bytes
from fuyou_cli.planner.device import BOUNDARIES_ACROSS, GRADIENTS_ACROSS, WEIGHTS_UP
from fuyou_cli.planner.schedule import Visit
from fuyou_cli.spec.plan import Span
from fuyou_cli.swap import kernels
from tests.emulated import EmulatedDevice, Rates

from .families import gpt2, llama
from .measuring import copied_in_a_step
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


@crossed(
    4,
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
            up, down = copied_in_a_step(rig, number=2)
        ids = 8 * shape.batch * shape.tokens * (not stays)
        up -= 2 * ids * sum(stage.kind == "embedding" for stage in subject.spec.stages) + ids * (not shape.vocabulary)
        moved[stays] = up, down
        assert charged[0] - up == charged[1] - down
        assert up == charged[0] or ("kept" in way and 0.9 * charged[0] < up < charged[0])
    boundary = subject.spec.boundary_bytes_per_token * subject.numerics.tokens
    stages = sum(stage.keeps_input for stage in subject.spec.stages)
    assert moved[False][0] - moved[True][0] >= 2 * stages * boundary  # in forward, and gradients
    assert moved[False][1] - moved[True][1] >= 2 * stages * boundary


# ---- waits ---------------------------------------------------------------------------------------------------------


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


# ---- the launching thread's own work -------------------------------------------------------------------------------


class _Watched:
    """The native library, and who calls its kernels."""

    def __init__(self, library: Any) -> None:
        self._library, self.callers = library, dict[str, set[int]]()

    def __getattr__(self, name: str) -> Any:
        self.callers.setdefault(name, set()).add(threading.get_ident())
        return getattr(self._library, name)


def test_the_launching_thread_sums_nothing(subject: Subject, tmp_path: Path, monkeypatch: Any) -> None:
    with Rig(subject, tmp_path, device="emulated", gradients="ssd") as rig:
        watched = _Watched(kernels.lib)
        monkeypatch.setattr(kernels, "lib", watched)
        rig.step(*next(subject.batches(1)), 1, last=True)
        records = rig.executor.visits.residency.records
        rig.executor.visits.residency.wait_until(lambda: all(r.gradient_write is None for r in records), "the test")
        monkeypatch.undo()
        assert watched.callers.keys() == {"fy_sum_squares"}
        assert threading.get_ident() not in watched.callers["fy_sum_squares"]
        rig.executor.drain()


# ---- as a plan charges it --------------------------------------------------------------------------------------------


def _by_place(rig: Rig, work: dict[int, int]) -> dict[tuple[str, str], int]:
    """Sums by phase and stage; pieces of an embedding together, for what is in which depends on the ids."""
    found = Counter[tuple[str, str]]()
    for visit in rig.executor.visits.schedule.visits:
        stage = rig.spec.stages[visit.stage]
        found[visit.phase, "embedding" if stage.kind == "embedding" else stage.name] += work[visit.index]
    return dict(found)


@crossed(
    4, family=["llama", "tied", "gpt2"], on_device=[True, False],
    numerics=[(0, "float32", 0.5), (0, "bfloat16", None), (40, "float32", None), (40, "bfloat16", 0.5)],
)  # fmt: skip
def test_the_plan_charges_what_the_launching_thread_does(
    family: str, numerics: tuple[int, Any, float | None], on_device: bool, tmp_path: Path
) -> None:
    """Compares visit by visit, byte by byte."""
    vocabulary, dtype, clip = numerics
    config = gpt2() if family == "gpt2" else llama(tie_word_embeddings=family == "tied")
    subject = Subject(config, Shape(dtype=dtype, vocabulary=vocabulary))
    with Rig(subject, tmp_path, device="emulated", clip=clip, batch_on_device=on_device) as rig:
        crossings, counted, before = rig.executor.visits.crossings, dict[int, int](), 0

        def after(visit: Visit) -> None:
            nonlocal before
            counted[visit.index], before = crossings.staged - before, crossings.staged

        rig.executor.after_visit = after
        rig.run(2)
        assert before == crossings.staged
        visits = rig.executor.visits.schedule.visits
        charged = {visit.index: staged_bytes(rig.spec, subject.numerics, visit, on_device=on_device) for visit in visits}
        assert _by_place(rig, counted) == _by_place(rig, charged)
