"""Values that are not finite stop the run, by name, before they can spread where clipping waits for the norm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fuyou_cli.core.errors import NumericsError

from .families import llama
from .rig import OPTIMIZER, Rig, Shape, Subject, unequal


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(llama(), Shape())


def _poisoned_from(subject: Subject, step: int, rig: Rig) -> Any:
    """The gradient that reaches the first block's MLP is NaN from `step` on; the later stages' are fine."""
    mlp = subject.anatomy.model.get_submodule("model.layers.0.mlp")

    def poison(module: Any, grad_input: Any, grad_output: Any) -> Any:
        return (grad_input[0] * float("nan"),) if rig.executor._step >= step else None

    return mlp.register_full_backward_hook(poison)


def test_gradients_with_clipping_change_nothing(subject: Subject, tmp_path: Path) -> None:
    with Rig(subject, tmp_path / "two") as rig:
        rig.run(2)
        expected = rig.weights()
    with Rig(subject, tmp_path / "three") as rig:
        hook = _poisoned_from(subject, 3, rig)
        try:
            with pytest.raises(NumericsError, match=r"step 3: \d+ gradients of model\.layers\.0\.\S+ \(layers\.0\)"):
                rig.run(3)
        finally:
            hook.remove()
        rig.executor.abandon()
        rig.executor.drain()
        assert rig.generations == {2}
        assert unequal(rig.weights(), expected) == []


def test_gradients_without_clipping_stop_at_their_stage(subject: Subject, tmp_path: Path) -> None:
    with Rig(subject, tmp_path, clip=None) as rig:
        hook = _poisoned_from(subject, 2, rig)
        try:
            with pytest.raises(NumericsError, match=r"step 2: \d+ weights of layers\.0 are not finite"):
                rig.run(2)
        finally:
            hook.remove()


@pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_weights_that_are_not_finite(clip: float | None, device: Any, subject: Subject, tmp_path: Path) -> None:
    """A NaN in a block reaches the loss, so the head's gradients are the first to be seen."""
    poisoned = {name: value.clone() for name, value in subject.initial.items()}
    poisoned["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    with Rig(subject, tmp_path, clip=clip, device=device) as rig:
        rig.put_weights(poisoned)
        with pytest.raises(NumericsError, match=r"step 1: \d+ (gradients of lm_head\.weight \(head\)|weights of head)"):
            rig.run(2)
        if clip is not None:
            rig.executor.abandon()
            rig.executor.drain()
            assert rig.generations == {0}
            assert unequal(rig.weights(), poisoned) == []


def test_infinite_weights_after_an_update(subject: Subject, tmp_path: Path) -> None:
    """Gradients may be finite while the rate is not sane."""
    with (
        Rig(subject, tmp_path, clip=0.5, optimizer=replace(OPTIMIZER, lr=3e38)) as rig,
        pytest.raises(NumericsError, match=r"step 1: \d+ weights of \S+ are not finite after the update"),
    ):
        rig.run(2)
    assert torch.isfinite(torch.tensor(rig.losses)).all()


def test_a_copy_that_failed_is_not_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed copy is over, too: whoever takes its target for gradients must hear of it."""
    with Rig(Subject(llama(), Shape()), tmp_path, device="emulated", clip=None) as rig:
        download = rig.device.download
        monkeypatch.setattr(rig.device, "download", lambda device, host: download(device[:-1], host))
        with pytest.raises(RuntimeError, match="size"):
            rig.run(1)
