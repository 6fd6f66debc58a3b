"""Tests that AdamW by tensor operations is the library's, bit for bit, however a stage is cut into chunks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fuyou_cli.engine.device_adamw import DeviceAdamW, DeviceState, is_lost
from fuyou_cli.engine.skeleton import TORCH_DTYPE
from fuyou_cli.engine.updates import Optimizer, Scalars
from fuyou_cli.planner.device import UPDATE_SCRATCH
from fuyou_cli.spec.model import Dtype
from fuyou_cli.swap import kernels
from fuyou_cli.swap.requests import Segment, Update

COUNT = 2048 * 3
SEGMENTS = (
    Segment(first=0, count=1000, weight_decay=0.1), Segment(first=1003, count=4001, weight_decay=0.01),
    Segment(first=5100, count=1000, weight_decay=0.0),
)  # fmt: skip


def _tensors(generator: torch.Generator, narrow: bool) -> dict[str, torch.Tensor]:
    """Makes a state and gradients of many magnitudes, denormals and zeros among them."""

    def values(low: int, high: int) -> torch.Tensor:
        found = torch.randn(COUNT, generator=generator) * 10.0 ** torch.randint(low, high, (COUNT,), generator=generator)
        return found * (torch.rand(COUNT, generator=generator) > 0.1)

    found = {"weights": values(-8, 3), "momentum": values(-42, 1), "variance": values(-42, 1).abs()}
    if narrow:
        found["weights"] = found["weights"].bfloat16()
        rest = torch.randint(-(1 << 15), 1 << 15, (COUNT,), generator=generator).to(torch.int16)
        # Below a zero there is no master, only the bits of a NaN, which a GPU does not hand on as they are.
        found["remainder"] = rest.where(found["weights"] != 0, rest.clamp(min=0))
    return found


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _by_library(
    tensors: dict[str, torch.Tensor], gradients: torch.Tensor, scalars: Scalars, weights: Dtype, summed_in: Dtype
) -> int:
    optimizer = scalars.optimizer
    update = Update(
        params=COUNT, weights_dtype=weights, gradients_dtype=summed_in, weights=0, lr=scalars.lr, beta1=optimizer.beta1,
        beta2=optimizer.beta2, epsilon=optimizer.epsilon, gradient_scale=scalars.gradient_scale, step=scalars.step,
        segments=SEGMENTS,
    )  # fmt: skip
    return kernels.adamw(update, gradients=_bytes(gradients), **{name: _bytes(value) for name, value in tensors.items()})


def _by_device(adamw: DeviceAdamW, tensors: dict[str, torch.Tensor], gradients: torch.Tensor, scalars: Scalars) -> int:
    state = DeviceState(remainder=tensors.get("remainder"), **{k: v for k, v in tensors.items() if k != "remainder"})
    return int(adamw.update(state, gradients, scalars, SEGMENTS))


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("summed_in", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", [dict(), dict(beta1=0.3, beta2=0.95), dict(epsilon=1e-6, beta2=0.98)])
@pytest.mark.parametrize(
    ("device", "chunk"), [("cpu", 1 << 14), ("cpu", 700), pytest.param("cuda", 700, marks=pytest.mark.gpu)]
)
def test_it_is_the_librarys(weights: Dtype, summed_in: Dtype, way: dict[str, Any], device: str, chunk: int) -> None:
    narrow = weights == "bfloat16"
    generator = torch.Generator().manual_seed(7)
    theirs = _tensors(generator, narrow)
    there = {name: value.clone().to(device) for name, value in theirs.items()}
    optimizer = Optimizer(**{"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.1, **way})
    adamw = DeviceAdamW(torch.empty(UPDATE_SCRATCH * 4 * chunk, dtype=torch.uint8, device=device))
    for step in range(1, 13):
        gradients = _tensors(generator, False)["momentum"].to(TORCH_DTYPE[summed_in])
        given = gradients.clone().to(device)
        scalars = Scalars(optimizer=optimizer, lr=1e-3 * step, step=step, gradient_scale=1.0 if step % 2 else 0.37)
        worst = _by_device(adamw, there, given, scalars)
        lost = _by_library(theirs, gradients, scalars, weights, summed_in)
        assert is_lost(worst, narrow=narrow) == (lost > 0)
        assert [name for name in theirs if not _same(there[name].cpu(), theirs[name])] == []
        assert _same(given.cpu(), gradients)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -math.nan, 3.4e38, 3.3e38, -3.395e38])
def test_it_finds_what_the_library_finds(weights: Dtype, value: float) -> None:
    """Finds also a finite master that is not finite as a bfloat16."""
    narrow = weights == "bfloat16"
    tensors = _tensors(torch.Generator().manual_seed(3), narrow)
    tensors["momentum"].zero_(), tensors["variance"].fill_(1.0)
    if narrow:
        master = torch.tensor([value]).view(torch.int32)
        tensors["weights"].view(torch.int16)[1200] = int((master >> 16).item())
        tensors["remainder"][1200] = 0
    else:
        tensors["weights"][1200] = value
    theirs = {name: part.clone() for name, part in tensors.items()}
    optimizer = Optimizer(lr=1e-9, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0)
    scalars, gradients = Scalars(optimizer=optimizer, lr=1e-9, step=5), torch.zeros(COUNT)
    adamw = DeviceAdamW(torch.empty(UPDATE_SCRATCH * 4 * 512, dtype=torch.uint8))
    worst = _by_device(adamw, tensors, gradients, scalars)
    assert is_lost(worst, narrow=narrow) == (_by_library(theirs, gradients, scalars, weights, "float32") > 0)
