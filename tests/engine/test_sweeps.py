"""Tests that a step in several sweeps over the model gives the bits of one sweep, and moves the bytes that its plan says."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from drawn import every
from transformers import PreTrainedConfig

from fuyou_cli.engine.executor import StepAbandoned
from fuyou_cli.planner.schedule import Visit

from .comparing import Outcome, assert_same
from .families import gpt2, gptj, llama
from .rig import SPARE, Rig, Shape, Subject, assert_moves_as_planned

STEPS = 3
SHAPES = {
    "plain": Shape(batch=6, micro=1),
    "pieces": Shape(batch=6, micro=1, vocabulary=40, chunk=8),
    "bf16": Shape(batch=12, micro=2, dtype="bfloat16"),
    "bf16 pieces": Shape(batch=12, micro=2, dtype="bfloat16", vocabulary=40, accumulate="bfloat16"),
}

InOne = Callable[[Subject, float | None], Outcome]


@pytest.fixture(scope="module")
def subjects() -> Callable[[str], Subject]:
    """Makes each once: pytest would make a parametrised fixture anew for every test that names other parameters with it.

    Untied, with dropout in attention: which numbers it draws depends on the micro-batch alone."""
    return cache(lambda shape: Subject(llama(num_hidden_layers=3, attention_dropout=0.1), SHAPES[shape]))


@pytest.fixture
def subject(request: pytest.FixtureRequest, subjects: Callable[[str], Subject]) -> Subject:
    return subjects(request.param)


@pytest.fixture(scope="module")
def in_one(tmp_path_factory: pytest.TempPathFactory) -> InOne:
    """Gives in_one(subject, clip), what one sweep gives, computed once."""
    return cache(lambda subject, clip: _outcome(subject, tmp_path_factory.mktemp("one"), clip=clip))


def _outcome(subject: Subject, folder: Path, **way: Any) -> Outcome:
    with Rig(subject, folder, **way) as rig:
        losses = rig.run(STEPS)
        assert rig.device.peak_memory() <= rig.plan.predicted.gpu_peak + SPARE
        return losses, rig.weights()


@pytest.mark.parametrize(
    ("subject", "clip", "sweeps"),
    every(
        2,
        [
            ("plain", 0.5, 2),
            ("plain", None, 3),
            ("plain", 0.5, 6),
            ("bf16 pieces", None, 2),
            ("bf16 pieces", 0.5, 3),
            ("bf16 pieces", None, 6),
        ],
    ),
    indirect=["subject"],
)
def test_one_more_step_moves_exactly_what_was_predicted(
    subject: Subject, clip: float | None, sweeps: int, tmp_path: Path
) -> None:
    assert_moves_as_planned(subject, tmp_path, clip=clip, lookahead=1, sweeps=sweeps)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("subject", ["plain"], indirect=True)
def test_a_step_given_up_in_its_second_sweep_can_be_done_again(
    device: Any, subject: Subject, in_one: InOne, tmp_path: Path
) -> None:
    expected = in_one(subject, 0.5)
    with Rig(subject, tmp_path, clip=0.5, device=device, sweeps=3, lookahead=3) as rig:
        batches = list(subject.batches(STEPS))
        rig.step(*batches[0], 1)

        def give_up(visit: Visit, phase: str) -> None:
            if visit.sweep == 1 and visit.phase == phase and rig.spec.stages[visit.stage].kind == "block":
                raise StepAbandoned

        for phase in ("forward", "backward", "backward", "backward"):
            rig.executor.after_visit = partial(give_up, phase=phase)
            with pytest.raises(StepAbandoned):
                rig.step(*batches[1], 2)
            rig.executor.abandon()
            rig.executor.drain()
        rig.executor.after_visit = lambda visit: None
        for number in range(2, STEPS + 1):
            rig.step(*batches[number - 1], number, last=number == STEPS)
        rig.executor.drain()
        assert_same((rig.losses, rig.weights()), expected)


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
    subject = Subject(llama(), SHAPES["plain"])
    sizes = []
    for sweeps in (1, 3):
        with Rig(subject, tmp_path / str(sweeps), home="cpu", kept="all", sweeps=sweeps) as rig:
            sizes.append(sum(stage.boundary_ram.size for stage in rig.plan.stages if stage.boundary_ram))
            assert all(stage.gradients_ram is not None for stage in rig.plan.stages if rig.spec.stages[stage.stage].params)
    assert sizes[0] == 3 * sizes[1]
