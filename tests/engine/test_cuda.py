"""On a real GPU: the same steps as on the CPU, and placement changes no bit there either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .families import gpt2, llama
from .rig import Rig, Shape, Subject, unequal

pytestmark = pytest.mark.gpu
STEPS = 4


def _outcome(subject: Subject, folder: Path, **way: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    with Rig(subject, folder, **way) as rig:
        return rig.run(STEPS), rig.weights()


@pytest.fixture(params=["gpt2", "llama"])
def subject(request: pytest.FixtureRequest) -> Subject:
    config = gpt2() if request.param == "gpt2" else llama(hidden_size=64, intermediate_size=128, num_hidden_layers=3)
    return Subject(config, Shape())


@pytest.mark.parametrize("clip", [0.5, None])
def test_the_same_steps_as_on_the_cpu(subject: Subject, clip: float | None, tmp_path: Path) -> None:
    ours, _ = _outcome(subject, tmp_path / "cuda", device="cuda", clip=clip)
    theirs, _ = _outcome(subject, tmp_path / "cpu", clip=clip)
    assert ours == pytest.approx(theirs, rel=1e-4)  # other kernels, other order of sums


@pytest.mark.parametrize("way", [dict(home="cpu"), dict(lookahead=1), dict(lookahead=4, directories=3, update_threads=2)])
def test_bitwise_the_same_wherever_bytes_rest(subject: Subject, way: dict[str, Any], tmp_path: Path) -> None:
    expected = _outcome(subject, tmp_path / "first", device="cuda")
    found = _outcome(subject, tmp_path / "second", device="cuda", **way)
    assert found[0] == expected[0]
    assert unequal(found[1], expected[1]) == []
