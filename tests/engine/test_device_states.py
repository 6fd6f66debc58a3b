"""What rests on the device and is updated there gives the bits that a run through host memory gives, and moves nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fuyou_cli.engine.devices.emulated import EmulatedDevice

from .families import llama
from .rig import Rig, Shape, Subject, unequal

STEPS = 4


def _run(subject: Subject, folder: Path, **way: Any) -> tuple[list[float], dict[str, torch.Tensor], int, int]:
    """Losses, weights, the most device memory in use and what the plan has of it."""
    opened = EmulatedDevice()
    with Rig(subject, folder, device="emulated", opened=opened, **way) as rig:
        losses = rig.run(STEPS)
        return losses, rig.weights(), opened.peak_memory(), rig.plan.predicted.gpu_peak


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.parametrize("shape", [Shape(), Shape(dtype="bfloat16"), Shape(dtype="bfloat16", vocabulary=40)])
def test_everything_on_the_device_is_the_same_run(shape: Shape, clip: float | None, tied: bool, tmp_path: Path) -> None:
    subject = Subject(llama(tie_word_embeddings=tied), shape)
    wanted, weights, _, _ = _run(subject, tmp_path / "host", home="cpu", clip=clip)
    losses, found, peak, planned = _run(subject, tmp_path / "device", home="gpu", boundaries="cpu", clip=clip)
    assert losses == wanted
    assert unequal(found, weights) == []
    assert peak <= planned
