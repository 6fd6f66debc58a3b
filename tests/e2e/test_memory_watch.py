"""Tests that what is shown as memory now is never above the peak beside it, and that freed memory goes back to the system where
a visit might not find it again within the plan's peak, and nowhere else; and that whoever waits for a drive says what for."""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fuyou_cli.core import probe, process
from fuyou_cli.core.units import GiB
from fuyou_cli.training.exporting import export_store
from fuyou_cli.training.run import Run
from fuyou_cli.training.state.at_rest import saved_store, verify_store
from fuyou_cli.training.step_meter import MemoryWatch

from .conftest import NewProject, Project
from .running import loaded_run, prepared_run, store_of

STEPS = 2


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


def calls_of(monkeypatch: pytest.MonkeyPatch, project: Project, size: Callable[[int], int]) -> tuple[list[str], int]:
    """Returns what happened, in order, in a process that has size(planned peak) bytes; visits of the run."""
    prepared = prepared_run(project)
    calls: list[str] = []
    now = size(prepared.planned.plan.predicted.cpu_peak)
    monkeypatch.setattr(probe, "process_bytes", lambda: now)
    monkeypatch.setattr(probe, "highest_bytes", lambda: 0)
    monkeypatch.setattr(process, "trim", lambda apart: calls.append("trim"))
    with Run(prepared) as run:
        run.load(lambda count: None)
        executor = run.executor
        between, after = executor.between_micro_batches, executor.after_visit

        def counted_between() -> None:
            calls.append("micro-batch")
            between()

        def counted_after(visit: object) -> None:
            calls.append("visit")
            after(visit)  # type: ignore[arg-type]

        executor.between_micro_batches, executor.after_visit = counted_between, counted_after
        run.train(lambda report: None)
        return calls, STEPS * len(executor.visits.schedule.visits)


@pytest.fixture
def project(new_project: NewProject) -> Project:
    return new_project(changes={"train.max_steps": STEPS})


def test_a_process_far_below_its_peak_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch, project: Project) -> None:
    calls, visits = calls_of(monkeypatch, project, lambda peak: 1)
    assert calls.count("visit") == visits and calls.count("micro-batch") > visits // 2
    assert "trim" not in calls


def test_a_process_at_its_peak_gives_back_all_it_can(monkeypatch: pytest.MonkeyPatch, project: Project) -> None:
    calls, visits = calls_of(monkeypatch, project, lambda peak: peak)
    assert calls.count("trim") == calls.count("visit") + calls.count("micro-batch")
    assert calls.count("visit") == visits


def test_a_visit_needs_room_for_all_it_takes(monkeypatch: pytest.MonkeyPatch, project: Project) -> None:
    """Leaves room for all that compute takes, of which a fifth is never counted on: the hungriest do not fit."""
    prepared = prepared_run(project)
    compute = sum(line.size for line in prepared.planned.plan.memory if line.what == "compute")
    calls, visits = calls_of(monkeypatch, project, lambda peak: peak - compute)
    after_visits = [one for one, before in zip(calls[1:], calls, strict=False) if before == "visit"]
    assert 0 < after_visits.count("trim") < visits
    after_micro_batches = [one for one, before in zip(calls[1:], calls, strict=False) if before == "micro-batch"]
    assert "trim" not in after_micro_batches


# ---- a drive that does not answer ----------------------------------------------------------------------------------------


def _said(heard: list[str], begin: str) -> str:
    return next((said for said in [*heard] if said.startswith(begin)), "")


def test_a_flush_that_does_not_come_back_is_named(new_project: NewProject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds a flush back in the middle of a step, and where the run ends, until it has been named."""
    in_step, at_the_end = (
        "waiting for commit of the step before (step 3, ",
        "waiting for the commit of step 4 (after step 4) for ",
    )
    monkeypatch.setattr("fuyou_cli.core.process.FIRST", 0.05)
    changes = {"train.max_steps": 4, "train.clip_grad_norm": None, "offload.defer_updates": 0}
    project, heard = new_project(changes=changes), list[str]()
    with loaded_run(project, announce=heard.append) as run:
        flush, flushed = run.store.sync, list[int]()

        def late() -> None:
            flushed.append(run.step)
            awaited = {3: in_step, 5: at_the_end}.get(len(flushed))  # of steps 0 to 4
            while awaited is not None and not _said(heard, awaited):
                time.sleep(0.01)
            flush()

        run.saver.commits._flush = late
        run.train(lambda report: None)
    assert all("nothing was read, written or updated for" in _said(heard, awaited) for awaited in (in_step, at_the_end))


def test_a_store_that_is_verified_or_exported_is_named(
    stopped: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sets no time at all as too long, so that every drive is silent."""
    monkeypatch.setattr("fuyou_cli.core.process.FIRST", 0.0)
    monkeypatch.setattr("fuyou_cli.swap.daemon._SLICE_NS", 0)
    store, heard = store_of(stopped), list[str]()
    verify_store(saved_store(store), say=heard.append)
    assert heard and all(said.startswith(f"waiting for the store ({store}) for ") for said in heard)
    heard.clear()
    export_store(saved_store(store), tmp_path / "model", dtype="float32", max_shard_size=1 << 30, say=heard.append)
    assert heard and all(said.startswith(f"waiting for the store ({store}) for ") for said in heard)
