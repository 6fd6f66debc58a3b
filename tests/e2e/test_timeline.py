"""Tests that what a step's timeline says of the ssd is what the counters say: the I/O of updates is most of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuyou_cli.training.report import StepReport, phases

from .conftest import NewProject
from .running import STEPS, run_of


@pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "unclipped"])
def test_every_byte_is_on_the_timeline(new_project: NewProject, clip: float | None) -> None:
    project = new_project(changes={"train.max_steps": STEPS, "train.clip_grad_norm": clip})
    reports: list[StepReport] = []
    with run_of(project) as run:
        run.load(lambda count: None)
        run.train(reports.append)
    shown, seen = {"ssd read": 0, "ssd write": 0}, set()
    for report in _with_timelines(reports):
        resources = {item.resource for item in report.timeline}
        assert {"compute", *shown} <= resources
        seen |= resources
        for item in report.timeline:
            assert 0 <= item.begin <= item.end
            if item.resource in shown:
                shown[item.resource] += item.bytes
    assert seen == {"compute", "update", *shown}  # in all steps: on a busy machine one of them may end before its updates
    counted = [sum(report.read_bytes for report in reports[1:]), sum(report.written_bytes for report in reports[1:])]
    # what a step's end finds under way is told with the next step, or after the last
    assert list(shown.values()) == pytest.approx(counted, rel=0.25)


def _with_timelines(reports: list[StepReport]) -> list[StepReport]:
    """Runs steps; the first one is left out, whose updates have no states to read."""
    assert all(report.timeline for report in reports)
    return reports[1:]


def test_what_saving_writes_is_no_part_of_a_step(new_project: NewProject) -> None:
    in_ram = dict.fromkeys(("offload.weights", "offload.optimizer_states", "offload.gradients", "offload.boundaries"), "cpu")
    project = new_project(changes={"train.max_steps": STEPS, "checkpoint.commit_every_steps": None, **in_ram})
    with run_of(project) as run:
        run.load(lambda count: None)
        loaded = run.daemon.counters()
        run.train(lambda report: None)
        trained = run.daemon.counters()
        assert run.saver.saved_bytes >= 12 * run.model.parameters - 4096 * len(run.model.stages)
    assert trained.written_bytes - loaded.written_bytes == run.saver.saved_bytes
    assert trained.read_bytes == loaded.read_bytes


def test_copies_to_a_device_of_its_own_are_on_the_timeline(new_project: NewProject) -> None:
    project = new_project(changes={"train.max_steps": STEPS, "offload.device": "emulated"})
    reports: list[StepReport] = []
    with run_of(project) as run:
        run.load(lambda count: None)
        run.train(reports.append)
        report = run.report()
        weights = sum(stage.weights_at.size for stage in run.plan.stages)
    for step in _with_timelines(reports):
        moved = {way: [item for item in step.timeline if item.resource == way] for way in ("h2d", "d2h")}
        assert sum(item.bytes for item in moved["h2d"]) >= weights <= sum(item.bytes for item in moved["d2h"])
        assert all(0 <= item.begin <= item.end for items in moved.values() for item in items)
    assert min(report.busy["h2d"], report.busy["d2h"]) > 0


def test_a_backward_that_only_measures_has_its_own_name(new_project: NewProject, llama: Path) -> None:
    changes = {"offload.norm_first": "always", "offload.gradients": "auto", "train.max_steps": 2}
    reports: list[StepReport] = []
    with run_of(new_project(changes={"model.name_or_path": str(llama), **changes})) as run:
        run.load(lambda count: None)
        run.train(reports.append)
    for report in reports:
        assert [name for name, _, _ in phases(report.timeline)] == ["forward", "norm", "backward"]
