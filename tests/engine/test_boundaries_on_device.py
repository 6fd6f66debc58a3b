"""Boundaries that rest in the device's memory: not a bit of the result changes, none of them crosses, and no byte is taken that
the plan does not charge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fuyou_cli.planner.boundary_layout import every_operator
from fuyou_cli.planner.device_memory import device_memory
from tests.emulated import EmulatedDevice

from .comparing import assert_same
from .families import gpt2, llama
from .rig import Rig, Shape, Subject
from .test_kept_outputs import UNEVEN, _outcome, _two_steps_one_given_up

THERE: dict[str, Any] = {"home": "cpu", "device": "emulated", "boundaries": "gpu"}


@pytest.mark.parametrize(
    ("dropout", "way"),
    [
        (0.0, {"home": "ssd"}), (0.0, {"kept_there": "room", "clip": None}), (0.1, {"kept_there": "room"}),
        (0.0, {"states": "gpu", "gradients": "gpu", "home": "gpu"}), (0.1, {"home": "ssd", "clip": None, "defer": 0.5}),
    ],
    ids=["ssd", "outputs", "dropout", "updated-there", "deferred"],
)  # fmt: skip
def test_bitwise_recompute(dropout: float, way: dict[str, Any], tmp_path: Path) -> None:
    subject = Subject(gpt2(dropout=dropout), Shape(**UNEVEN))
    expected = _outcome(subject, tmp_path / "cpu", clip=way.get("clip", 0.5))
    assert_same(_outcome(subject, tmp_path / "gpu", **{**THERE, **way}), expected)


def test_bitwise_in_sweeps(tmp_path: Path) -> None:
    subject = Subject(llama(), Shape(batch=4, micro=1, dtype="bfloat16"))
    assert_same(_outcome(subject, tmp_path / "gpu", **THERE, sweeps=2), _outcome(subject, tmp_path / "cpu"))


def test_none_of_them_crosses(tmp_path: Path) -> None:
    """Counts what crosses: less by every boundary, once each way."""
    subject = Subject(llama(num_hidden_layers=3), Shape(batch=4, micro=2, tokens=32))
    moved = []
    for boundaries in ("cpu", "gpu"):
        with Rig(subject, tmp_path / boundaries, **{**THERE, "boundaries": boundaries}) as rig:
            rig.step(*next(subject.batches(1)), 1, last=True)
            rig.executor.drain()
            rig.device.synchronize()
            copies = rig.device.copies()
            moved.append([sum(copy.bytes for copy in copies if copy.up == up) for up in (True, False)])
    one = subject.spec.boundary_bytes_per_token * subject.numerics.tokens
    every = one * sum(stage.keeps_input for stage in subject.spec.stages)
    stashed = one * sum(visit.stash for visit in rig.executor.schedule.visits)
    assert moved[0] == [moved[1][0] + every, moved[1][1] + stashed] and stashed


@pytest.mark.parametrize("kept_there", [False, True])
def test_memory_is_what_the_plan_charges(kept_there: bool, tmp_path: Path) -> None:
    """Takes to the byte more than without, and never more than the plan; nothing in RAM."""
    subject = Subject(llama(), Shape(**UNEVEN))
    there = every_operator(subject.spec) if kept_there else None
    peaks, charged, limit = [], [], 0
    for boundaries in ("cpu", "gpu"):
        with Rig(subject, tmp_path / boundaries, kept_there=there, **{**THERE, "boundaries": boundaries}) as rig:
            rig.run(1)
            peaks.append(rig.device.peak_memory())
            charged.append(device_memory(subject.spec, rig.request, rig.plan.stages).boundaries)
            limit = rig.plan.predicted.gpu_peak
            in_ram = sum(line.size for line in rig.plan.memory if (line.what, line.tier) == ("boundaries", "cpu"))
            assert bool(in_ram) == (boundaries == "cpu")
    assert peaks[1] - peaks[0] == charged[1] > charged[0] == 0
    with Rig(subject, tmp_path / "limit", kept_there=there, opened=EmulatedDevice(limit), **THERE) as rig:
        rig.run(1)


def test_a_step_given_up_leaves_nothing_behind(tmp_path: Path) -> None:
    subject = Subject(llama(), Shape())
    expected = _outcome(subject, tmp_path / "whole")
    with Rig(subject, tmp_path / "broken", **THERE) as rig:
        _two_steps_one_given_up(rig, subject)
        assert_same((rig.losses, rig.weights()), expected)
