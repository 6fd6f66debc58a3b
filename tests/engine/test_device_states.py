"""Tests that what rests on the device and is updated there gives the bits of a run through host memory, and moves nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from drawn import every, examples
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.core.errors import NumericsError
from fuyou_cli.engine.devices.emulated import EmulatedDevice
from fuyou_cli.planner.bound import copied_bytes
from fuyou_cli.planner.costs import Costs
from fuyou_cli.spec.model import Dtype
from fuyou_cli.spec.plan import Tier

from .families import llama
from .rig import HARDWARE, OPTIMIZER, Rig, Shape, Subject, unequal

STEPS = 4


def _run(subject: Subject, folder: Path, **way: Any) -> tuple[list[float], dict[str, torch.Tensor], int, int]:
    """Returns losses, weights, the most device memory in use and what the plan has of it."""
    opened = EmulatedDevice()
    with Rig(subject, folder, device="emulated", opened=opened, **way) as rig:
        losses = rig.run(STEPS)
        return losses, rig.weights(), opened.peak_memory(), rig.plan.predicted.gpu_peak


@pytest.mark.parametrize(
    ("tied", "clip", "shape"),
    every(5, product([False, True], [0.5, None], [Shape(), Shape(dtype="bfloat16"), Shape(dtype="bfloat16", vocabulary=40)])),
)
def test_everything_on_the_device_is_the_same_run(shape: Shape, clip: float | None, tied: bool, tmp_path: Path) -> None:
    subject = Subject(llama(tie_word_embeddings=tied), shape)
    wanted, weights, _, _ = _run(subject, tmp_path / "host", home="cpu", clip=clip)
    losses, found, peak, planned = _run(subject, tmp_path / "device", home="gpu", boundaries="cpu", clip=clip)
    assert losses == wanted
    assert unequal(found, weights) == []
    assert peak <= planned


@pytest.fixture(scope="module")
def subjects() -> dict[tuple[str, bool], Subject]:
    return {
        (dtype, tied): Subject(
            llama(num_hidden_layers=3, tie_word_embeddings=tied), Shape(dtype=dtype, vocabulary=40 * tied, accumulate=dtype)
        )
        for dtype in ("float32", "bfloat16")
        for tied in (False, True)
    }


@examples(6, share_fixtures=True)
@given(
    dtype=st.sampled_from(["float32", "bfloat16"]), tied=st.booleans(), clip=st.sampled_from([0.5, None]),
    there=st.sets(st.integers(0, 9)), home=st.sampled_from(["ssd", "cpu", None]), lookahead=st.integers(1, 3),
    defer=st.sampled_from([0.0, 0.5, 1.0]), stays=st.booleans(), sweeps=st.sampled_from([1, 2]),
    kept_there=st.sampled_from([None, "room"]),
)  # fmt: skip
def test_any_mix_of_homes_is_the_same_run(
    dtype: str, tied: bool, clip: float | None, there: set[int], home: Tier | None, lookahead: int, defer: float, stays: bool,
    sweeps: int, kept_there: Literal["room"] | None,
    subjects: dict[tuple[str, bool], Subject], tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """And a device never has more in use than the plan says, nor has much less at the most."""
    subject = subjects[dtype, tied]
    chosen = tuple(stage for stage in sorted(there) if stage < len(subject.spec.stages))
    way: dict[str, Any] = dict(
        clip=clip, lookahead=lookahead, defer=None if clip else defer, batch_on_device=stays, sweeps=sweeps
    )
    wanted, weights, _, _ = _run(subject, tmp_path_factory.mktemp("host"), home=home, **way)
    losses, found, peak, planned = _run(
        subject,
        tmp_path_factory.mktemp("device"),
        home=home,
        device_states=chosen,
        gpu_budget=1 << 30,
        kept_there=kept_there,
        **way,
    )
    assert losses == wanted
    assert unequal(found, weights) == []
    assert peak <= planned


@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.parametrize("there", [(0, 1, 2, 3, 4, 5), (1, 3)])
def test_a_step_copies_what_its_plan_says(there: tuple[int, ...], clip: float | None, tmp_path: Path) -> None:
    """Of stages that rest there, nothing but what their blocks keep for backward; the update reads and writes there."""
    subject = Subject(llama(num_hidden_layers=3), Shape(dtype="bfloat16"))
    with Rig(subject, tmp_path, device="emulated", home="cpu", device_states=there, clip=clip) as rig:
        charged = copied_bytes(Costs.of(rig.spec, HARDWARE, rig.plan), rig.executor.schedule.visits, stages=rig.plan.stages)
        first, second = subject.batches(2)
        rig.step(*first, 1)
        rig.executor.drain()
        rig.device.copies()
        updates = rig.counters().update_params
        rig.step(*second, 2, last=True)
        rig.executor.drain()
        rig.device.synchronize()
        copies = rig.device.copies()
        elsewhere = sum(stage.params for stage in rig.spec.stages if stage.index not in there)
        assert rig.counters().update_params - updates == elsewhere
    up, down = (sum(copy.bytes for copy in copies if copy.up == way) for way in (True, False))
    assert (up, down) == charged
    kept = sum(stage.keeps_input for stage in subject.spec.stages)
    boundary = subject.spec.boundary_bytes_per_token * subject.numerics.tokens
    assert len(there) < 6 or (up, down) == (kept * boundary, kept * boundary)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_not_finite_end_the_run(dtype: Dtype, tmp_path: Path) -> None:
    subject = Subject(llama(num_hidden_layers=2), Shape(dtype=dtype))
    optimizer = replace(OPTIMIZER, lr=1e38 if dtype == "float32" else 1e39)
    with (
        Rig(subject, tmp_path, device="emulated", home="gpu", boundaries="cpu", clip=None, optimizer=optimizer) as rig,
        pytest.raises(NumericsError, match=r"step 1: weights of .* are not finite after the update"),
    ):
        rig.run(2)
