"""Devices by themselves: what they are seeded with, how much memory they have, what they may pin, and how they close."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from drawn import crossed

from fuyou_cli.core.errors import OutOfSpaceError
from fuyou_cli.engine.devices import cuda, open_device
from fuyou_cli.engine.devices.cuda import BulkCopies, CudaCopies, CudaDevice, PinnedMemory, free_memory
from tests.emulated import ComputeClock, CopyEngine, EmulatedDevice

from .families import llama
from .rig import Rig, Shape, Subject

MiB = 1 << 20


@pytest.mark.parametrize("kind", ["cpu", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_seed_gives_torchs_numbers_and_formats_no_stack(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts no stack, as torch.manual_seed takes one for every backend that is not started: 0.3 ms, for every dropout of every
    stage."""
    device = open_device(kind)
    torch.manual_seed(1 << 40)
    expected = torch.rand(5), torch.rand(5, device=device.torch_device)
    monkeypatch.setattr(traceback, "format_stack", lambda *_: pytest.fail("a stack was formatted"))
    device.seed(1 << 40)
    found = torch.rand(5), torch.rand(5, device=device.torch_device)
    device.close()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_more_memory_than_it_was_opened_with(kind: str) -> None:
    """Counts live bytes: what was let go of may be had again. On a GPU the workspaces that products of other tests left count
    as well, for the limit is the process's."""
    device = open_device(kind)
    left = device.memory()
    device.close()
    device = open_device(kind, memory=left + 64 * MiB)
    first = device.empty(40 * MiB)
    with pytest.raises(torch.OutOfMemoryError):
        device.empty(40 * MiB)
    assert 40 * MiB <= device.memory() - left <= 64 * MiB
    part = first[:10]
    del first
    gc.collect()
    with pytest.raises(torch.OutOfMemoryError):  # a view keeps it
        device.empty(40 * MiB)
    del part
    gc.collect()
    again = device.empty_like(torch.zeros(10 * MiB))  # float32
    assert again.shape == (10 * MiB,) and 40 * MiB <= device.peak_memory() - left <= 64 * MiB
    del again
    device.close()
    open_device(kind).close()  # the limit goes with the device


@crossed(2, kept=[None, "all"], vocabulary=[0, 40])
def test_a_step_has_what_is_planned_and_no_more(vocabulary: int, kept: Any, tmp_path: Path) -> None:
    """Runs with what the plan takes of the device; without what it charges for compute there is no room for the copies."""
    subject = Subject(llama(), Shape(batch=5, micro=2, vocabulary=vocabulary))

    def opened(memory: int | None) -> Rig:
        return Rig(subject, tmp_path / str(memory), device="emulated", opened=EmulatedDevice(memory=memory), kept=kept)

    with opened(None) as rig:
        fixed = rig.device.memory()
        planned = rig.plan.predicted.gpu_peak
        losses = rig.run(2)
        least = rig.device.peak_memory()
        assert (fixed if kept is None else fixed + 1) <= least <= planned  # of a batch that stays, kept outputs alone come up
    with opened(planned) as rig:
        assert rig.run(2) == losses
    if fixed < least:
        with opened(least - 1) as rig:
            with pytest.raises(torch.OutOfMemoryError):
                rig.run(2)
            rig.executor.abandon()
    with pytest.raises(torch.OutOfMemoryError):
        opened(fixed - 1)


# ---- pinning -----------------------------------------------------------------------------------------------------------


def test_memory_that_cannot_be_pinned_is_told_with_what_to_do() -> None:
    pinned = PinnedMemory(lambda address, size: False, lambda address: pytest.fail("it was not registered"))
    with pytest.raises(OutOfSpaceError, match=r"cannot pin 3\.00 GiB of host memory") as caught:
        pinned.pin(torch.empty(3 << 30, dtype=torch.uint8))  # of which no page is touched
    assert "offload.max_memory.cpu" in str(caught.value.hint)
    pinned.close()


def test_copy_threads_of_a_gpu_tell_every_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tells it whatever it is, or who waits would do so for ever. The threads themselves, where there is no GPU."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda *_: None)
    after = SimpleNamespace(before=lambda stream: None)
    copies = BulkCopies(torch.device("cuda", 0), CudaCopies(), up=True)
    event = copies.submit(torch.zeros(4), torch.zeros(100 << 20, dtype=torch.uint8), after)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        event.synchronize()
    copies.close()


class _Noted:
    """Stands for torch's event, where there is no GPU: which events of one stream there are, in order."""

    of_stream: ClassVar[list[_Noted]] = []

    def __init__(self, **kind: bool) -> None:
        self.blocks = kind["blocking"]

    def record(self, stream: object) -> None:
        self.of_stream.append(self)

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def test_a_large_copy_of_a_gpu_is_told_as_one_from_its_first_piece_to_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has one event before its pieces and one after each, which the thread that hands them on sleeps for."""
    stand_ins = {"Stream": lambda *_: None, "set_device": lambda *_: None, "Event": _Noted, "stream": nullcontext}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(cuda, "PIECE", 2048)
    monkeypatch.setattr(_Noted, "of_stream", events := list[_Noted]())
    copies, source, target = CudaCopies(), torch.randn(600), torch.zeros(600)
    bulk = BulkCopies(torch.device("cuda", 0), copies, up=True)
    last = bulk.submit(source, target, SimpleNamespace(before=lambda stream: None)).handed_on()
    bulk.close()
    ((up, begin, end, size),) = copies.take_ended()
    assert (up, size, end) == (True, 2400, last) and torch.equal(source, target)
    assert [event.blocks for event in events] == [False, True, True, True]
    assert (begin._event, end._event) == (events[0], events[-1])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_copy_thread_that_ends_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends it by a failure that is no torch error, too, and asks it for something afterwards."""

    def broken(source: torch.Tensor, target: torch.Tensor) -> None:
        raise TypeError("broken")

    engine = CopyEngine("copies", deque(), ComputeClock(), up=True)
    monkeypatch.setattr(engine, "copy", broken)
    for _ in range(2):
        event = engine.submit(torch.ones(4), torch.zeros(4), begins=0.0, bulk=False)
        with pytest.raises(RuntimeError, match="the copy thread failed"):
            event.synchronize()
    engine.close()


def test_a_closed_copy_engine_leaves_nobody_waiting() -> None:
    engine, copied = CopyEngine("copies", deque(), ComputeClock(), up=True), torch.zeros(4)
    before = engine.submit(torch.ones(4), copied, begins=0.0, bulk=False)
    engine.close()
    before.synchronize()
    assert torch.equal(copied, torch.ones(4))
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(torch.ones(4), torch.zeros(4), begins=0.0, bulk=False).synchronize()


def test_what_is_pinned_is_held_until_it_is_not(tmp_path: Path) -> None:
    """Holds it, as a registration of memory that is gone would be one of what comes to its place."""
    pinned = PinnedMemory(lambda address, size: True, lambda address: None)
    host = torch.zeros(10)
    gone = weakref.ref(host)
    pinned.pin(host)
    del host
    gc.collect()
    assert gone() is not None
    pinned.close()
    gc.collect()
    assert gone() is None


# ---- closing -----------------------------------------------------------------------------------------------------------


def test_a_context_that_has_failed_hides_no_error_and_leaves_nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises what failed where it did; closing goes on to the end."""
    registered: set[int] = set()
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: registered.add(address) or 0, cudaHostUnregister=registered.discard
    )

    def fails(device: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    device = CudaDevice.__new__(CudaDevice)
    device._ready(torch.device("cuda", 0))
    device.pin(torch.zeros(10))
    assert registered
    device.close()
    assert not registered


def test_what_is_free_of_a_card_counts_cached_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts blocks of the card that are free to all, and kept by this process's allocator without being used."""
    for name, value in (("mem_get_info", (20, 24)), ("memory_reserved", 3), ("memory_allocated", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda card, value=value: {None: value, 1: value}[card])
    assert free_memory() == free_memory(1) == 22
