"""On a real GPU: the same steps as on the CPU, and placement changes no bit there either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fuyou_cli.core.errors import NumericsError
from fuyou_cli.engine.devices import open_device
from fuyou_cli.engine.devices.lanes import squares_in_lanes
from fuyou_cli.planner.device import square_lanes

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


# ---- squares of gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_are_those_of_any_device_that_adds_in_this_order(dtype: torch.dtype) -> None:
    """Bit by bit, whatever card it is: also of runs longer than there are lanes."""
    counts = [1, 7, 4096, (1 << 21) + 5, 3 * (1 << 21)]
    runs = [(sum(counts[:number]), count) for number, count in enumerate(counts)]
    flat = (torch.randn(sum(counts), generator=torch.Generator().manual_seed(3)) * 1e-3).to(dtype)
    here = torch.empty(square_lanes(max(counts)), dtype=torch.float64)
    device = open_device("cuda")
    try:
        there = flat.to(device.torch_device)
        lanes = device.empty(8 * here.numel())
        found = [device.squares(there, runs, lanes) for _ in range(2)]
        assert found[0].values() == found[1].values() == squares_in_lanes(flat, runs, here).tolist()
        assert found[0].done()
    finally:
        device.close()


def test_squares_are_behind_the_compute_in_front_and_keep_nobody_waiting() -> None:
    device = open_device("cuda")
    try:
        flat = torch.ones(1 << 20, device=device.torch_device)
        lanes = device.empty(8 * flat.numel())
        device.squares(flat, [(0, flat.numel())], lanes).values()  # the first call takes memory, which may wait
        torch.cuda.synchronize()
        torch.cuda._sleep(1 << 31)  # about a second
        flat.mul_(2)
        squares = device.squares(flat, [(0, flat.numel())], lanes)
        assert not squares.done()  # it returned while the device still sleeps
        assert squares.values() == [4.0 * flat.numel()]
    finally:
        device.close()


@pytest.mark.parametrize("clip", [0.5, None])
def test_gradients_that_are_not_finite_are_named(clip: float | None, tmp_path: Path) -> None:
    subject = Subject(llama(), Shape())
    mlp = subject.anatomy.model.get_submodule("model.layers.0.mlp")
    hook = mlp.register_full_backward_hook(lambda module, into, out: (into[0] * float("nan"),))
    try:
        with (
            Rig(subject, tmp_path, device="cuda", clip=clip) as rig,
            pytest.raises(NumericsError, match=r"step 1: [1-9]\d* gradients of model\.layers\.0\.\S+ \(layers\.0\)"),
        ):
            rig.run(1)
    finally:
        hook.remove()


def test_the_norm_is_that_of_the_cpu(subject: Subject, tmp_path: Path) -> None:
    norms = []
    for device in ("cuda", "cpu"):
        with Rig(subject, tmp_path / device, device=device) as rig:
            norms.append(rig.step(*next(subject.batches(1)), 1, last=True).grad_norm)
            rig.executor.drain()
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
