"""Tests that values that are not finite stop the run, by name, before they can spread where clipping waits for the norm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fuyou_cli.core.errors import NumericsError

from .comparing import unequal
from .families import llama
from .rig import OPTIMIZER, Rig, Shape, Subject
from .test_equal_bits import MODELS


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(llama(), Shape())


def _poisoned_from(rig: Rig, step: int, block: int = 0) -> Any:
    """The gradient that reaches a block's MLP is NaN from `step` on; the later stages' are fine."""
    mlp = rig.anatomy.model.get_submodule(f"model.layers.{block}.mlp")

    def poison(module: Any, grad_input: Any, grad_output: Any) -> Any:
        return (grad_input[0] * float("nan"),) if rig.executor.visits.step >= step else None

    return mlp.register_full_backward_hook(poison)


def _assert_given_up(rig: Rig, generation: int, weights: dict[str, torch.Tensor]) -> None:
    rig.executor.abandon()
    rig.executor.drain()
    assert rig.generations == {generation}
    assert unequal(rig.weights(), weights) == []


def test_gradients_with_clipping_change_nothing(subject: Subject, tmp_path: Path) -> None:
    with Rig(subject, tmp_path / "two") as rig:
        rig.run(2)
        expected = rig.weights()
    with Rig(subject, tmp_path / "three") as rig:
        hook = _poisoned_from(rig, 3)
        try:
            with pytest.raises(NumericsError, match=r"step 3: \d+ gradients of model\.layers\.0\.\S+ \(layers\.0\)"):
                rig.run(3)
        finally:
            hook.remove()
        _assert_given_up(rig, 2, expected)


@pytest.mark.parametrize("defer", [False, True])
def test_gradients_without_clipping_stop_at_their_stage(defer: bool, tmp_path: Path) -> None:
    """The stages above are updated by then, but for updates that wait for the next forward; none spreads what is wrong."""
    with Rig(MODELS["llama"](), tmp_path, clip=None, defer=defer) as rig:
        waiting = [s.index for s in rig.spec.stages if s.kind == "block" and rig.plan.stages[s.index].deferred]
        block = waiting[0] - 1 if waiting else 0
        hook = _poisoned_from(rig, 2, block)
        told = rf"step 2: \d+ gradients of model\.layers\.{block}\.\S+ \(layers\.{block}\)"
        try:
            with pytest.raises(NumericsError, match=told) as ended:
                rig.run(3)
        finally:
            hook.remove()
        assert ended.value.changed == (not defer)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_gradients_of_the_first_stage_change_nothing(device: Any, subject: Subject, tmp_path: Path) -> None:
    """Updates nothing before the head's gradients, without clipping."""
    with Rig(subject, tmp_path, clip=None, device=device) as rig:

        def poison() -> None:
            for total in rig.executor.visits.sums._sums.values():
                total.flat.fill_(float("nan"))

        rig.executor.between_micro_batches = poison
        with pytest.raises(NumericsError, match=r"step 1: \d+ gradients of lm_head\.weight \(head\)") as ended:
            rig.run(1)
        assert not ended.value.changed
        _assert_given_up(rig, 0, subject.initial)


@pytest.mark.parametrize(
    ("device", "clip", "vocabulary"), [("cpu", 0.5, 0), ("cpu", None, 40), ("emulated", 0.5, 40), ("emulated", None, 0)]
)
def test_a_loss_that_is_not_finite_changes_nothing(clip: float | None, device: Any, vocabulary: int, tmp_path: Path) -> None:
    """Puts a NaN in a block: it reaches the loss, which is looked at before anything is updated."""
    subject = Subject(llama(), Shape(vocabulary=vocabulary))
    poisoned = {name: value.clone() for name, value in subject.initial.items()}
    poisoned["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    with Rig(subject, tmp_path, clip=clip, device=device) as rig:
        rig.put_weights(poisoned)
        with pytest.raises(NumericsError, match=r"step 1: the loss \(head\S*\) is nan") as ended:
            rig.run(2)
        assert not ended.value.changed
        _assert_given_up(rig, 0, poisoned)


BFLOAT16 = Shape(dtype="bfloat16")


@pytest.mark.parametrize(("device", "home"), [("cpu", "ssd"), ("emulated", "cpu")])
@pytest.mark.parametrize("step", [1, 2])
def test_a_skipped_step_is_as_if_it_had_not_been(step: int, device: Any, home: Any, tmp_path: Path) -> None:
    """Compares weights, masters, moments and AdamW's count of steps: the run goes on as one that never had that batch."""
    subject = Subject(llama(), BFLOAT16)
    batches = list(subject.batches(3))
    with Rig(subject, tmp_path / "without", device=device, home=home) as rig:
        for number in (1, 2, 3):
            rig.executor.skipped = int(number > step)
            if number != step:
                rig.step(*batches[number - 1], number, last=number == 3)
        rig.executor.drain()
        expected = rig.masters()
    with Rig(subject, tmp_path / "skipped", device=device, home=home) as rig:
        hook = _poisoned_from(rig, step)
        rig.executor.may_skip = True
        for number in (1, 2, 3):
            outcome = rig.step(*batches[number - 1], number, last=number == 3)
            assert (f"step {step}: " in outcome.skipped) == (number == step)
            if number == step:
                hook.remove()
        rig.executor.drain()
        assert rig.generations == {3} and rig.executor.skipped == 1
        assert unequal(rig.masters(), expected) == []


def test_infinite_weights_after_an_update(subject: Subject, tmp_path: Path) -> None:
    """Takes finite gradients with a rate that is not sane."""
    with (
        Rig(subject, tmp_path, clip=0.5, optimizer=replace(OPTIMIZER, lr=3e38)) as rig,
        pytest.raises(NumericsError, match=r"step 1: \d+ weights of \S+ are not finite after the update"),
    ):
        rig.run(2)
    assert torch.isfinite(torch.tensor(rig.losses)).all()


def test_a_copy_that_failed_is_not_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a copy, which is then over, too: whoever takes its target for gradients must hear of it."""
    with Rig(Subject(llama(), Shape()), tmp_path, device="emulated", clip=None) as rig:
        download = rig.device.download
        monkeypatch.setattr(rig.device, "download", lambda device, host, **how: download(device[:-1], host, **how))
        with pytest.raises(RuntimeError, match="size"):
            rig.run(1)
