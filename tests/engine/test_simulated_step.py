"""A simulated step asks for the same transfers and updates as a real one: both follow one schedule and one set of ledgers, so a
difference would be in how the simulator's loop or the executor's passes use them. Those of one kind come in the same order, but
where the clock decides: of updates that wait for the norm whichever has its gradients and weights first, boundaries read for a
device with memory of its own as its copies end, and which weights just updated are still there when they are wanted again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from drawn import crossed

from fuyou_cli.planner.ledgers import Record
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.simulate import simulate
from fuyou_cli.spec.model import StageSpec
from fuyou_cli.spec.plan import Plan

from .families import llama
from .rig import HARDWARE, Rig, Shape, Subject

STEPS = 4
Asked = dict[str, list[int]]  # what -> stages in the order they were asked for


@pytest.fixture(scope="module", params=[{}, {"tie_word_embeddings": True}], ids=["untied", "tied"])
def subject(request: pytest.FixtureRequest) -> Subject:
    config = llama(num_hidden_layers=5, **request.param)
    return Subject(config, Shape(dtype="bfloat16", batch=4, micro=1))


class _Heard:
    """The daemon, and what it was asked for."""

    def __init__(self, daemon: Any, plan: Plan) -> None:
        self._daemon, self._stages = daemon, plan.stages
        self.asked: Asked = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._daemon, name)

    def read(self, arena: int, store: int, size: int, *, priority: int = 0, label: int = 0) -> int:
        self._hear("read", store, label)
        return self._daemon.read(arena, store, size, priority=priority, label=label)

    def write(self, arena: int, store: int, size: int, *, priority: int = 0, label: int = 0) -> int:
        self._hear("write", store, label)
        return self._daemon.write(arena, store, size, priority=priority, label=label)

    def update(self, update: Any) -> int:
        self.asked.setdefault("update", []).append(update.label)
        return self._daemon.update(update)

    def _hear(self, direction: str, store: int, label: int) -> None:
        stage = self._stages[label]
        what = "weights"
        if stage.boundary_extent is not None and store == stage.boundary_extent.offset:
            what = "boundary"
        if stage.gradients_extent is not None and store == stage.gradients_extent.offset:
            what = "gradients"
        self.asked.setdefault(f"{direction} {what}", []).append(label)


def _hear_updates_there(rig: Rig, heard: _Heard) -> None:
    states = rig.executor.visits.states
    update = states.update

    def updates(record: Record, *, target: int, copied: bool) -> int:
        heard.asked.setdefault("update", []).append(record.stage)
        return update(record, target=target, copied=copied)

    states.update = updates  # type: ignore[method-assign]


def _really(subject: Subject, folder: Path, **options: Any) -> tuple[Plan, Asked]:
    """Returns what the last whole step of a few asks for."""
    with Rig(subject, folder, **options) as rig:
        heard = _Heard(rig.daemon, rig.plan)
        rig.executor.visits.boundaries.ledger.transfers = heard
        rig.executor.visits.moves.daemon = heard  # type: ignore[assignment]  # which the residency ledger asks by way of the moves
        _hear_updates_there(rig, heard)
        asked: Asked = {}
        for number, (ids, labels) in enumerate(subject.batches(STEPS), start=1):
            rig.step(ids, labels, number)
            asked, heard.asked = heard.asked, {}
        rig.executor.drain()
        return rig.plan, asked


def _on_paper(subject: Subject, plan: Plan) -> Asked:
    step = simulate(subject.spec, replace(HARDWARE, device=plan.device), plan, plan_schedule(subject.spec, plan), steps=STEPS)
    asked: Asked = {}
    for done in step.asked:
        asked.setdefault(done.what, []).append(done.stage)
    return asked


@crossed(2, device=["cpu", "emulated"], lookahead=[1, 3])
def test_clipped_the_requests_are_the_same(
    device: Literal["cpu", "emulated"], lookahead: int, subject: Subject, tmp_path: Path
) -> None:
    plan, really = _really(subject, tmp_path, clip=0.5, device=device, lookahead=lookahead)
    paper = _on_paper(subject, plan)
    assert {what: sorted(stages) for what, stages in paper.items()} == {what: sorted(stages) for what, stages in really.items()}
    ordered = paper.keys() - {"update"} - ({"read boundary"} if device == "emulated" else set())
    assert ordered >= {"read weights", "write boundary", "write gradients"}
    for what in ordered:
        assert paper[what] == really[what], what


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_unclipped_the_requests_are_the_same(device: Literal["cpu", "emulated"], subject: Subject, tmp_path: Path) -> None:
    """Reads weights in the order of the schedule, from where the step before had read ahead to."""
    plan, really = _really(subject, tmp_path, clip=None, device=device, lookahead=2)
    paper = _on_paper(subject, plan)
    assert paper.keys() == really.keys()
    for what in ("update", "write boundary", "read boundary"):
        assert paper[what] == really[what], what
    for asked in (paper, really):
        _check_order(subject, plan, asked)


@crossed(2, device=["cpu", "emulated"], defer=[None, True])
def test_with_the_norm_first_the_requests_are_the_same(
    device: Literal["cpu", "emulated"], defer: bool | None, tmp_path: Path
) -> None:
    """Reads boundaries twice, and writes gradients only of updates that run in the next forward."""
    subject = Subject(llama(num_hidden_layers=5), Shape(dtype="bfloat16", batch=4, micro=1))
    plan, really = _really(subject, tmp_path, clip=0.5, norm_first=True, device=device, lookahead=2, defer=defer)
    paper = _on_paper(subject, plan)
    assert paper.keys() == really.keys()
    for what in paper.keys() - {"read weights"}:
        assert sorted(paper[what]) == sorted(really[what]), what
    assert len(really["read boundary"]) == 2 * len(really["write boundary"])
    assert ("write gradients" in really) == (defer is not None)
    for what in ("write boundary", *(["update", "read boundary"] if device == "cpu" and defer is None else [])):
        assert paper[what] == really[what], what
    for asked in (paper, really):
        _check_order(subject, plan, asked)


@crossed(2, there=[(0, 2, 3), (0, 1, 2, 3, 4, 5, 6, 7)], clip=[0.5, None])
def test_with_stages_on_the_device_the_requests_are_the_same(
    clip: float | None, there: tuple[int, ...], subject: Subject, tmp_path: Path
) -> None:
    """Asks nothing of the store for those stages."""
    plan, really = _really(subject, tmp_path, clip=clip, device="emulated", lookahead=2, device_states=there)
    paper = _on_paper(subject, plan)
    assert paper.keys() == really.keys()
    assert sorted(paper["update"]) == sorted(really["update"]) == sorted({stage.index for stage in _owners(subject)})
    for what in ("read weights", "write gradients", "read gradients"):
        assert not {*paper.get(what, ()), *really.get(what, ())} & set(there)
    for asked in (paper, really):  # how long updated weights are still there is up to the clock
        _check_order(subject, plan, asked)


def _check_order(subject: Subject, plan: Plan, asked: Asked) -> None:
    """Checks that weights are read in the order of the schedule, as far as they are read at all."""
    planned = [visit.owner for visit in plan_schedule(subject.spec, plan).visits if visit.fetch]
    coming, read = iter([*planned, *planned[: plan.lookahead]]), asked.get("read weights", [])
    assert len(read) <= len(planned)
    assert all(stage in coming for stage in read), read


def _owners(subject: Subject) -> list[StageSpec]:
    return [stage for stage in subject.spec.stages if stage.params]
