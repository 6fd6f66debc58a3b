"""A step that measures its norm first is the same step, bit for bit: a first backward squares gradients and drops them, and
updates run beside a second one with the factor that is known then. It moves the bytes that its plan says."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import every

from fuyou_cli.core.errors import NumericsError
from fuyou_cli.engine.executor import StepAbandoned
from fuyou_cli.engine.gradients import GradientSum
from fuyou_cli.engine.updates import Scalars
from fuyou_cli.planner.schedule import Visit

from .comparing import assert_same, unequal
from .families import gpt2, llama
from .rig import Rig, Shape, Subject, assert_moves_as_planned, outcome

STEPS = 3


@pytest.fixture(scope="module")
def subjects() -> Callable[[str], Subject]:
    def made(name: str) -> Subject:
        if name == "gpt2":  # with dropout within blocks and between stages
            config = gpt2(dropout=0.1)
            config.tie_word_embeddings = False
            return Subject(config, Shape(batch=4, micro=2))
        states: Any = "int8" if name == "int8" else "float32"
        cut = 40 if name == "cut" else 0
        return Subject(llama(num_hidden_layers=3), Shape(dtype="bfloat16", batch=4, micro=2, states=states, vocabulary=cut))

    return cache(made)


WAYS: dict[str, dict[str, Any]] = {
    "ssd": {"lookahead": 1},
    "far ahead": {"lookahead": 4},
    "ram": {"home": "cpu"},
    "device": {"device": "emulated", "lookahead": 2, "boundaries": "cpu"},
    "device, ssd": {"device": "emulated", "lookahead": 1},
    "across": {"device": "emulated", "home": "cpu", "batch_on_device": False},
    "outputs": {"kept": "all", "lookahead": 1},
    "outputs there": {"device": "emulated", "kept_there": "room", "boundaries": "cpu"},
    "states there": {"device": "emulated", "device_states": (1, 2), "lookahead": 2},
    "all later": {"defer": True, "lookahead": 2},
    "all later, device": {"defer": True, "device": "emulated", "home": "cpu"},
}


def test_no_update_begins_before_the_norm_is_known(subjects: Callable[[str], Subject], tmp_path: Path) -> None:
    with Rig(subjects("llama"), tmp_path, norm_first=True) as rig:
        visits, residency = rig.executor.visits.schedule.visits, rig.executor.visits.residency
        begun, update = list[tuple[int, float]](), residency.update_now

        def begins(stage: int, due: Scalars) -> None:
            begun.append((stage, due.gradient_scale))
            assert visits[rig.executor.visits.lookahead.cursor].again
            update(stage, due)

        residency.update_now = begins  # type: ignore[method-assign,assignment]
        outcome = rig.step(*next(rig.subject.batches(1)), 1)
        rig.executor.drain()
    measured = [visit.stage for visit in visits if visit.measures]
    assert measured == [visit.stage for visit in visits if visit.again] == [stage for stage, _ in begun]
    assert outcome.grad_norm is not None
    assert {scale for _, scale in begun} == {min(1.0, 0.5 / (outcome.grad_norm + 1e-6))} != {1.0}


@pytest.mark.parametrize("way", every(2, ["ssd", "outputs", "device, ssd", "some later", "states there"]))
def test_it_moves_what_the_plan_says(way: str, subjects: Callable[[str], Subject], tmp_path: Path) -> None:
    plan, _ = assert_moves_as_planned(subjects("llama"), tmp_path, clip=0.5, norm_first=True, **WAYS[way])
    gradients = plan.predicted.written_by["gradients"]
    assert gradients > 0 if way == "some later" else gradients == 0


@pytest.mark.parametrize("way", ["ssd", "device, ssd"])
def test_a_step_given_up_before_its_second_backward_changes_nothing(
    way: str, subjects: Callable[[str], Subject], tmp_path: Path
) -> None:
    subject = subjects("llama")
    usual = outcome(subject, tmp_path / "usual", STEPS, clip=0.5)
    with Rig(subject, tmp_path / "first", norm_first=True, **WAYS[way]) as rig:
        first = min(visit.index for visit in rig.executor.visits.schedule.visits if visit.again)
        batches = list(subject.batches(STEPS))
        rig.step(*batches[0], 1)
        for place in range(0, first, 3):
            _give_up(rig, batches[1], place)
        rig.step(*batches[1], 2)
        rig.step(*batches[2], 3, last=True)
        rig.executor.drain()
        assert_same((rig.losses, rig.weights()), usual)


def _give_up(rig: Rig, batch: tuple[torch.Tensor, torch.Tensor], place: int) -> None:
    """Gives up step 2 after the visit of this index."""

    def ends(visit: Visit) -> None:
        if visit.index == place:
            assert rig.executor.may_abandon()
            raise StepAbandoned

    rig.executor.after_visit = ends
    with pytest.raises(StepAbandoned):
        rig.step(*batch, 2)
    rig.executor.abandon()
    rig.executor.after_visit = lambda visit: None


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("way", ["ssd", "device, ssd"])
def test_numbers_that_are_not_finite_are_seen_before_any_update(
    way: str, skips: bool, subjects: Callable[[str], Subject], tmp_path: Path
) -> None:
    with Rig(subjects("llama"), tmp_path, norm_first=True, **WAYS[way]) as rig:
        batches = list(rig.subject.batches(2))
        rig.step(*batches[0], 1)
        rig.executor.drain()
        before = rig.weights()
        _spoil(rig)
        rig.executor.may_skip = skips
        if skips:
            outcome = rig.step(*batches[1], 2, last=True)
            assert "not finite" in outcome.skipped
            assert rig.executor.skipped == 1
            rig.executor.drain()
            assert rig.generations == {2}
        else:
            with pytest.raises(NumericsError, match="not finite") as error:
                rig.step(*batches[1], 2, last=True)
            assert not error.value.changed
            rig.executor.abandon()
        assert unequal(rig.weights(), before) == []


def _spoil(rig: Rig) -> None:
    """Makes the gradients of the first block infinite, whenever they are summed."""
    sums = rig.executor.visits.sums
    end, block = sums.end, next(stage.index for stage in rig.spec.stages if stage.kind == "block")

    def spoiled(visit: Visit, owner: int, total: GradientSum | None) -> None:
        if owner == block and total is not None:
            total.flat[0] = torch.inf
        end(visit, owner, total)

    sums.end = spoiled  # type: ignore[method-assign]
