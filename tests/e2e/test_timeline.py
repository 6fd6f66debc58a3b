"""Tests what a step's timeline says, beside the counters, and `--trace`: what Perfetto opens has every interval of the newest
steps, each track without overlaps."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from drawn import every

from fuyou_cli.core.errors import UsageError
from fuyou_cli.training import loggers
from fuyou_cli.training.loggers import Trace
from fuyou_cli.training.report import Busy, StepReport, phases
from fuyou_cli.training.run import Run

from .conftest import NewProject, Project
from .running import STEPS, loaded_run

MICRO_BATCHES = 2  # of the recipe's step


def _read(path: Path) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """The names of the tracks, and every interval."""
    events = json.loads(path.read_text())
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return names, [event for event in events if event["ph"] == "X"]


def _reported(project: Project, trace: Trace | None = None) -> tuple[Run, list[StepReport]]:
    reports: list[StepReport] = []
    with loaded_run(project) as run:
        if trace is not None:
            run.trace(trace)
        run.train(reports.append)
    return run, reports


@pytest.mark.parametrize(("device", "clip"), every(2, [("cpu", 0.5), ("cpu", None), ("emulated", None)]))
def test_every_interval_is_there_once(new_project: NewProject, tmp_path: Path, device: str, clip: float | None) -> None:
    """Compares a run's timelines with its counters, and with its trace."""
    changes = {"train.max_steps": STEPS, "offload.device": device, "train.clip_grad_norm": clip}
    with Trace(tmp_path / "trace.json") as trace:
        run, reports = _reported(new_project(changes=changes), trace)
    _check_timelines(run, reports, copies={"h2d", "d2h"} if device == "emulated" else set())
    _check_trace(run, reports, tmp_path / "trace.json")


def _check_timelines(run: Run, reports: list[StepReport], *, copies: set[str]) -> None:
    moved, seen = {"ssd read": 0, "ssd write": 0}, set()
    weights = sum(stage.weights_at.size for stage in run.plan.stages)
    assert all(report.timeline for report in reports)
    for report in reports[1:]:  # updates of the first one have no states to read
        resources = {item.resource for item in report.timeline}
        assert {"compute", *moved} <= resources
        seen |= resources
        for item in report.timeline:
            assert 0 <= item.begin <= item.end and item.resource != "update chunk"
            if item.resource in moved:
                moved[item.resource] += item.bytes
        assert all(sum(item.bytes for item in report.timeline if item.resource == way) >= weights for way in copies)
        assert all(report.busy[way] > 0 for way in copies)
    assert seen == {"compute", "update", *moved} | copies  # in all steps: of a busy machine one may end before its updates
    counted = [sum(report.read_bytes for report in reports[1:]), sum(report.written_bytes for report in reports[1:])]
    # what a step's end finds under way is told with the next step, or after the last
    assert list(moved.values()) == pytest.approx(counted, rel=0.25)


def _check_trace(run: Run, reports: list[StepReport], file: Path) -> None:
    names, events = _read(file)
    by_track = defaultdict(list)
    for event in events:
        assert event["tid"] in names
        by_track[event["tid"]].append(event)
    for on_track in by_track.values():
        for one, other in pairwise(sorted(on_track, key=lambda event: event["ts"])):
            assert one["ts"] + one["dur"] <= other["ts"] + 0.01  # microseconds, rounded
    by_kind = {kind: [event for event in events if event["cat"] == kind] for kind in {event["cat"] for event in events}}
    copies = {"h2d", "d2h"} if run.plan.device == "emulated" else set()
    waits = {"wait"} if any(sum(report.stalls.values()) > 0 for report in reports) else set[str]()
    assert set(by_kind) >= {"step", "compute", "visit", "update", "update chunk", "ssd read", "ssd write"} | copies | waits
    assert [event["name"] for event in by_kind["step"]] == [f"step {step}" for step in range(1, STEPS + 1)]
    for report in reports:
        of_step = [event for event in events if event["args"]["step"] == report.step]
        visits = [event for event in of_step if event["cat"] == "visit"]
        assert len(visits) == len(run.executor.visits.schedule.visits)
        blocks = [stage.name for stage in run.model.stages if stage.kind == "block"]
        for name in blocks:
            for phase in ("forward", "backward"):
                parts = [e for e in of_step if e["cat"] == "compute" and e["name"].startswith(f"{phase} {name}, ")]
                assert [e["name"][-1] for e in parts] == [str(number + 1) for number in range(MICRO_BATCHES)]
        waited = sum(event["dur"] for event in of_step if event["cat"] == "wait") / 1e6
        assert waited == pytest.approx(sum(report.stalls.values()), abs=1e-4)


def test_only_the_newest_steps_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Busy(resource="compute", label="forward block 0", begin=0.1, end=0.6)
    early = Busy(resource="ssd write", label="write block 0", begin=-0.2, end=0.3, bytes=10**9)
    with Trace(tmp_path / "many.json") as trace:
        for number in range(1, 26):
            trace.step(number, 1.0, begin=100.0 + number, items=[compute, early])
    _, events = _read(tmp_path / "many.json")
    assert {event["args"]["step"] for event in events} == set(range(26 - loggers.MOST_STEPS, 26))
    assert "steps 16 to 25 (the newest: at most 10 steps" in trace.summary
    assert {event["ts"] for event in events if event["cat"] == "ssd write"} >= {15.0e6, 24.0e6}  # the first begins at 0
    assert next(event for event in events if event["cat"] == "ssd write")["args"]["GB/s"] == 2.0
    monkeypatch.setattr(loggers, "MOST_BYTES", 1)
    with Trace(tmp_path / "one.json") as trace:
        for number in range(1, 4):
            trace.step(number, 1.0, begin=float(number), items=[compute])
    assert {event["args"]["step"] for event in _read(tmp_path / "one.json")[1]} == {3}


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        Trace(tmp_path / "none" / "trace.json")


def test_a_run_that_fails_leaves_its_trace(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Trace(tmp_path / "trace.json") as trace:
        trace.step(1, 1.0, begin=5.0, items=[])
        raise RuntimeError
    assert [event["name"] for event in _read(tmp_path / "trace.json")[1]] == ["step 1"]


def test_what_saving_writes_is_no_part_of_a_step(new_project: NewProject) -> None:
    in_ram = dict.fromkeys(("offload.weights", "offload.optimizer_states", "offload.gradients", "offload.boundaries"), "cpu")
    project = new_project(changes={"train.max_steps": STEPS, "checkpoint.commit_every_steps": None, **in_ram})
    with loaded_run(project) as run:
        loaded = run.daemon.counters()
        run.train(lambda report: None)
        trained = run.daemon.counters()
        assert run.saver.saved_bytes >= 12 * run.model.parameters - 4096 * len(run.model.stages)
    assert trained.written_bytes - loaded.written_bytes == run.saver.saved_bytes
    assert trained.read_bytes == loaded.read_bytes


def test_a_backward_that_only_measures_has_its_own_name(new_project: NewProject, llama: Path) -> None:
    changes = {"offload.norm_first": "always", "offload.gradients": "auto", "train.max_steps": 2}
    for report in _reported(new_project(changes={"model.name_or_path": str(llama), **changes}))[1]:
        assert [name for name, _, _ in phases(report.timeline)] == ["forward", "norm", "backward"]
