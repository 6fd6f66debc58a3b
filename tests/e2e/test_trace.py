"""Tests `--trace`: what Perfetto opens has every interval of the newest steps, each track without overlaps."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fuyou_cli.core.errors import UsageError
from fuyou_cli.training import loggers as tracing
from fuyou_cli.training.loggers import Trace
from fuyou_cli.training.report import Busy, StepReport
from fuyou_cli.training.run import Run

from .conftest import NewProject, Project
from .running import STEPS, run_of

MICRO_BATCHES = 2  # of the recipe's step


def _read(path: Path) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """The names of the tracks, and every interval."""
    events = json.loads(path.read_text())
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return names, [event for event in events if event["ph"] == "X"]


def _traced(project: Project, path: Path) -> tuple[Run, list[StepReport], Trace]:
    reports: list[StepReport] = []
    with (
        run_of(project) as run,
        Trace(path) as trace,
    ):
        run.load(lambda count: None)
        run.trace(trace)
        run.train(reports.append)
    return run, reports, trace


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_every_interval_is_on_a_track_of_its_own(new_project: NewProject, tmp_path: Path, device: str) -> None:
    project = new_project(changes={"train.max_steps": STEPS, "offload.device": device, "train.clip_grad_norm": None})
    run, reports, _ = _traced(project, tmp_path / "trace.json")
    names, events = _read(tmp_path / "trace.json")
    by_track = defaultdict(list)
    for event in events:
        assert event["tid"] in names
        by_track[event["tid"]].append(event)
    for on_track in by_track.values():
        for one, other in pairwise(sorted(on_track, key=lambda event: event["ts"])):
            assert one["ts"] + one["dur"] <= other["ts"] + 0.01  # microseconds, rounded
    by_kind = {kind: [event for event in events if event["cat"] == kind] for kind in {event["cat"] for event in events}}
    copies = {"h2d", "d2h"} if device == "emulated" else set()
    waits = {"wait"} if any(sum(report.stalls.values()) > 0 for report in reports) else set[str]()
    assert set(by_kind) >= {"step", "compute", "visit", "update", "update chunk", "ssd read", "ssd write"} | copies | waits
    assert all(item.resource != "update chunk" for report in reports for item in report.timeline)
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
    assert {event["args"]["step"] for event in events} == set(range(26 - tracing.MOST_STEPS, 26))
    assert "steps 16 to 25 (the newest: at most 10 steps" in trace.summary
    assert {event["ts"] for event in events if event["cat"] == "ssd write"} >= {15.0e6, 24.0e6}  # the first begins at 0
    assert next(event for event in events if event["cat"] == "ssd write")["args"]["GB/s"] == 2.0
    monkeypatch.setattr(tracing, "MOST_BYTES", 1)
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
