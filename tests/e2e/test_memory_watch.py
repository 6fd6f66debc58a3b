"""Tests that what is shown as memory now is never above the peak beside it."""

from __future__ import annotations

import itertools
import mmap

import pytest

from fuyou_cli.core import probe
from fuyou_cli.core.units import GiB
from fuyou_cli.training.run import Run
from fuyou_cli.training.step_meter import MemoryWatch

from .conftest import NewProject
from .running import prepared_run


def test_a_look_feeds_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = itertools.chain([5, 9, 7], itertools.repeat(1))
    monkeypatch.setattr(probe, "process_bytes", lambda: next(sizes))
    watch = MemoryWatch()  # its thread is not started
    assert (watch.look(), watch.peak) == (9, 9)
    assert (watch.look(), watch.peak) == (7, 9)


def test_a_run_says_when_it_passes_its_budget(monkeypatch: pytest.MonkeyPatch, new_project: NewProject) -> None:
    """With the number, in the step in which that happens; not again while it does not grow."""
    ready = prepared_run(new_project())
    said, seen = list[str](), list[int]()
    taken = [ready.planned.plan.cpu_budget - GiB]
    monkeypatch.setattr(probe, "process_bytes", lambda: taken[0])
    monkeypatch.setattr(probe, "highest_bytes", lambda: 0)
    with Run(ready, announce=said.append) as run:
        run.load(lambda count: None)

        def on_step(report: object) -> None:
            seen.append(len([text for text in said if "more than offload.max_memory.cpu" in text]))
            taken[0] = ready.planned.plan.cpu_budget + (GiB >> 1)

        run.train(on_step)
    assert seen[:4] == [0, 0, 1, 1]
    (told,) = [text for text in said if "more than offload.max_memory.cpu" in text]
    assert told.startswith("note: after step 2 the process has taken") and "512 MiB more" in told


def test_what_was_reached_is_since_it_was_asked_last(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, highest = iter([5, 9, 7, 7, 6]), iter([100, 8, 30])
    monkeypatch.setattr(probe, "process_bytes", lambda: next(sizes))
    monkeypatch.setattr(probe, "highest_bytes", lambda: next(highest))
    watch = MemoryWatch()  # what was before the run does not count
    watch.look()
    assert (watch.reached(), watch.peak) == (9, 9)
    assert (watch.reached(), watch.peak) == (30, 30)
    assert watch.look() == 6


def test_the_kernel_tells_what_a_look_misses() -> None:
    probe.highest_bytes()
    size = 1 << 26
    with mmap.mmap(-1, size) as block:  # not malloc: it may hand out pages that it kept, and keep them again
        block[::4096] = b"x" * (size // 4096)
    assert probe.highest_bytes() >= probe.process_bytes() + size // 2
    assert probe.highest_bytes() < probe.process_bytes() + size // 2
