"""When updates run: before the next forward reads their weights, at once, or beside a second backward; and what several sweeps
ask of a model. That no bit differs is shown by `test_equal_bits`, and what moves by `test_traffic`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import crossed
from transformers import PreTrainedConfig

from fuyou_cli.core.errors import NumericsError
from fuyou_cli.engine.gradients import GradientSum
from fuyou_cli.engine.updates import Scalars
from fuyou_cli.planner.schedule import Visit

from .comparing import unequal
from .families import gpt2, gptj, llama
from .rig import Rig, Shape, Subject
from .test_equal_bits import CUT, MODELS


def test_deferred_means_not_before_the_next_forward(tmp_path: Path) -> None:
    """Leaves all stages waiting when a step has ended, with the step's own rate and no clipping; then updates each before its
    own use."""
    with Rig(MODELS["llama"](), tmp_path, clip=None, defer=True) as rig:
        records, stages = rig.executor.visits.residency.records, rig.plan.stages
        batches = list(rig.subject.batches(2))
        rig.step(*batches[0], 1)
        waiting = {stage.index for stage in rig.owning_stages() if stages[stage.index].deferred}
        assert waiting == {record.stage for record in records if record.due is not None}
        assert {(r.due.step, r.due.gradient_scale) for r in records if r.due is not None} == {(1, 1.0)}
        assert all(records[stage].generation == 0 for stage in waiting)
        seen: dict[int, int] = {}

        def look() -> None:
            if rig.visit.phase == "forward" and rig.visit.owner is not None:
                seen[rig.visit.owner] = records[rig.visit.owner].generation

        rig.executor.between_micro_batches = look
        rig.step(*batches[1], 2, last=True)
        assert seen.keys() >= waiting - {0, rig.spec.stages[-1].index} and set(seen.values()) == {1}


@crossed(2, model=CUT, defer=[False, True])
def test_a_step_can_be_given_up_until_its_first_update(defer: bool, model: str, tmp_path: Path) -> None:
    with Rig(MODELS[model](), tmp_path, clip=None, defer=defer) as rig:
        records = rig.executor.visits.residency.records

        def look(*_: object) -> None:
            begun = any(r.update is not None or r.generation > 0 for r in records)
            assert not (begun and rig.executor.may_abandon())
            at_once = [v.index for v in rig.executor.visits.schedule.visits if v.update == "after"]
            assert rig.executor.may_abandon() == (rig.executor.visits.lookahead.cursor < min(at_once, default=1000))

        rig.executor.between_micro_batches = rig.executor.after_visit = look
        rig.run(1)
        assert rig.executor.may_abandon() == defer


# ---- a first backward that only measures the norm -----------------------------------------------------------------


def test_no_update_begins_before_the_norm_is_known(tmp_path: Path) -> None:
    with Rig(MODELS["bf16"](), tmp_path, norm_first=True) as rig:
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


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("way", [dict(lookahead=1), dict(device="emulated", lookahead=1)])
def test_numbers_that_are_not_finite_are_seen_before_any_update(way: dict[str, Any], skips: bool, tmp_path: Path) -> None:
    with Rig(MODELS["bf16"](), tmp_path, norm_first=True, **way) as rig:
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


# ---- sweeps ----------------------------------------------------------------------------------------------------------


FAMILIES: list[tuple[str, PreTrainedConfig, int, bool]] = [
    ("untied", llama(), 0, True),
    ("untied, cut", llama(), 40, True),
    ("tied", llama(tie_word_embeddings=True), 0, False),
    ("learned positions, tied", gpt2(), 0, False),
    ("no dropout between stages", gptj(), 0, True),
    ("dropout between stages", gptj(embd_pdrop=0.1), 0, False),
]


@pytest.mark.parametrize(("config", "vocabulary", "may"), [f[1:] for f in FAMILIES], ids=[f[0] for f in FAMILIES])
def test_which_models_may_be_swept(config: PreTrainedConfig, vocabulary: int, may: bool) -> None:
    """Refuses a tied head's and an embedding's gradients, which come in one order only; what is drawn or summed is of the whole
    batch."""
    assert Subject(config, Shape(vocabulary=vocabulary)).spec.may_sweep == may


def test_boundaries_take_a_sweep_of_rows(tmp_path: Path) -> None:
    """Divides what rests from forward to backward by the number of sweeps; gradients rest in between."""
    subject = Subject(llama(), Shape(batch=6, micro=1))
    sizes = []
    for sweeps in (1, 3):
        with Rig(subject, tmp_path / str(sweeps), home="cpu", kept="all", sweeps=sweeps) as rig:
            sizes.append(sum(stage.boundary_ram.size for stage in rig.plan.stages if stage.boundary_ram))
            assert all(stage.gradients_ram is not None for stage in rig.plan.stages if rig.spec.stages[stage.stage].params)
    assert sizes[0] == 3 * sizes[1]
