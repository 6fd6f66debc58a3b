"""Updates deferred into the next forward: not one bit of losses and weights changes, and every byte of the gradients' way is
planned."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fuyou_cli.core.errors import NumericsError
from fuyou_cli.engine.executor import StepAbandoned

from .comparing import Outcome, assert_same
from .families import gpt2, llama
from .rig import Rig, Shape, Subject, assert_moves_as_planned

STEPS = 3


def _subject(name: str) -> Subject:
    if name == "tied":
        return Subject(gpt2(dropout=0.1), Shape())
    if name == "tied, cut":
        return Subject(llama(tie_word_embeddings=True), Shape(vocabulary=40))
    # 37,000 parameters a block: an update takes three chunks
    return Subject(llama(hidden_size=64, intermediate_size=128, num_hidden_layers=3), Shape())


SUBJECTS = ["untied", "tied", "tied, cut"]


@pytest.fixture(scope="module")
def subjects() -> Callable[[str], Subject]:
    """Makes each once."""
    return cache(_subject)


@pytest.fixture(params=SUBJECTS)
def subject(request: pytest.FixtureRequest, subjects: Callable[[str], Subject]) -> Subject:
    return subjects(request.param)


@pytest.fixture(scope="module")
def at_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Subject], Outcome]:
    """Gives at_once(subject), what comes of it where no update is deferred, computed once."""

    @cache
    def outcome(subject: Subject) -> Outcome:
        with Rig(subject, tmp_path_factory.mktemp("store"), clip=None, defer=False) as rig:
            assert not any(stage.deferred for stage in rig.plan.stages)
            return rig.run(STEPS), rig.weights()

    return outcome


@pytest.fixture
def expected(subject: Subject, at_once: Callable[[Subject], Outcome]) -> Outcome:
    return at_once(subject)


def test_deferred_means_not_before_the_next_forward(tmp_path: Path) -> None:
    """Leaves all stages waiting when a step has ended, with the step's own rate and no clipping; then updates each before its
    own use."""
    with Rig(_subject("untied"), tmp_path, clip=None, defer=True) as rig:
        records, stages = rig.executor.visits.residency.records, rig.plan.stages
        batches = list(rig.subject.batches(2))
        rig.step(*batches[0], 1)
        waiting = {stage.index for stage in rig.owning_stages() if stages[stage.index].deferred}
        assert waiting == {record.stage for record in records if record.due is not None}
        assert {(r.due.step, r.due.gradient_scale) for r in records if r.due is not None} == {(1, 1.0)}
        assert all(records[stage].generation == 0 for stage in waiting)
        seen: dict[int, int] = {}

        def look() -> None:
            visit = rig.executor.visits.schedule.visits[rig.executor.visits.lookahead.cursor]
            if visit.phase == "forward" and visit.owner is not None:
                seen[visit.owner] = records[visit.owner].generation

        rig.executor.between_micro_batches = look
        rig.step(*batches[1], 2, last=True)
        assert seen.keys() >= waiting - {0, rig.spec.stages[-1].index} and set(seen.values()) == {1}


def test_one_more_step_moves_exactly_what_was_predicted(subject: Subject, tmp_path: Path) -> None:
    plan, updated = assert_moves_as_planned(subject, tmp_path, clip=None, defer=True, lookahead=1)
    predicted, waiting = plan.predicted, sum(subject.spec.stages[stage.stage].params for stage in plan.stages if stage.deferred)
    assert updated == subject.spec.stored_parameters
    two_users = sum(stage.params for stage in subject.spec.stages if subject.spec.has_two_users(stage.index))
    assert predicted.read_by["gradients"] == predicted.written_by["gradients"] == 4 * (waiting + two_users)


@pytest.mark.parametrize(("phase", "device"), [("forward", "cpu"), ("backward", "emulated")])
def test_a_step_given_up_can_be_done_again(
    phase: str, device: Any, subject: Subject, expected: Outcome, tmp_path: Path
) -> None:
    """Keeps updates of the step before due, and does them when the run is drained, as if it were saved and resumed here."""
    with Rig(subject, tmp_path, clip=None, defer=True, device=device) as rig:
        batches = list(subject.batches(STEPS))
        rig.step(*batches[0], 1)

        def give_up() -> None:
            visit = rig.executor.visits.schedule.visits[rig.executor.visits.lookahead.cursor]
            if visit.phase == phase and rig.spec.stages[visit.stage].kind == "block":
                assert rig.executor.may_abandon()
                raise StepAbandoned

        rig.executor.between_micro_batches = give_up
        for _ in range(3):  # more often than there are spans that could be lost
            with pytest.raises(StepAbandoned):
                rig.step(*batches[1], 2)
            rig.executor.abandon()
            rig.executor.drain()
            assert rig.generations == {1}
        rig.losses[1:] = []
        rig.executor.between_micro_batches = lambda: None
        for number in range(2, STEPS + 1):
            rig.step(*batches[number - 1], number, last=number == STEPS)
        rig.executor.drain()
        assert_same((rig.losses, rig.weights()), expected)


@pytest.mark.parametrize("defer", [False, True])
def test_a_step_can_be_given_up_until_its_first_update(defer: bool, subject: Subject, tmp_path: Path) -> None:
    with Rig(subject, tmp_path, clip=None, defer=defer) as rig:
        records = rig.executor.visits.residency.records

        def look(*_: object) -> None:
            begun = any(r.update is not None or r.generation > 0 for r in records)
            assert not (begun and rig.executor.may_abandon())
            at_once = [v.index for v in rig.executor.visits.schedule.visits if v.update == "after"]
            assert rig.executor.may_abandon() == (rig.executor.visits.lookahead.cursor < min(at_once, default=1000))

        rig.executor.between_micro_batches = rig.executor.after_visit = look
        rig.run(1)
        assert rig.executor.may_abandon() == defer


def test_gradients_that_are_not_finite_are_named_where_they_began(tmp_path: Path) -> None:
    """Names them in the step they belong to, before a deferred update could spread them; nothing has changed."""
    subject = _subject("untied")
    with Rig(subject, tmp_path, clip=None, defer=True) as rig:
        first = next(stage.index for stage in subject.spec.stages if stage.kind == "block") - 1  # of the blocks
        mlp = subject.anatomy.model.get_submodule(f"model.layers.{first}.mlp")

        def poison(module: Any, grad_input: Any, grad_output: Any) -> Any:
            return (grad_input[0] * float("nan"),) if rig.executor.visits.step >= 2 else None

        hook = mlp.register_full_backward_hook(poison)
        try:
            with pytest.raises(NumericsError, match=rf"step 2: \d+ gradients of model\.layers\.{first}\.\S+") as found:
                rig.run(3)
        finally:
            hook.remove()
        assert not found.value.changed
