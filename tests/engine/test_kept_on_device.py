"""Tests outputs and boundaries that stay in the device's memory: nothing crosses for them, and no byte is taken that the plan
does not charge. That no bit differs is shown by `test_equal_bits`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.describe import inspect
from fuyou_cli.planner.boundary_layout import every_operator
from fuyou_cli.planner.memory import device_memory
from tests.emulated import EmulatedDevice

from .comparing import assert_same
from .families import llama
from .late import make_late
from .rig import Rig, Shape, Subject
from .test_kept_outputs import UNEVEN, _changing, _outcome

THERE: dict[str, Any] = {"home": "cpu", "device": "emulated", "boundaries": "gpu"}


def test_an_output_changed_in_place_is_kept_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds it when the model is inspected: it is copied, where others are computed in their places."""
    subject = Subject(llama(), Shape())
    assert not any(operator.overwritten for operator in subject.spec.stages[1].operators)
    for layer in subject.anatomy.model.base_model.layers:
        monkeypatch.setattr(layer.mlp, "forward", _changing(layer.mlp))
    expected = _outcome(subject, tmp_path / "recompute")
    way = make_late(monkeypatch)
    with (
        pytest.raises(UsageError, match=r"add_ changes the output of mm"),
        Rig(subject, tmp_path / "unexpected", home="cpu", kept_there="room", **way) as rig,
    ):
        rig.run(1)
    subject.spec = inspect(
        subject.anatomy, dtype="float32", micro_batch_size=subject.shape.micro, max_seq_len=subject.shape.tokens,
        head_chunk_tokens=0,
    )  # fmt: skip
    changed = [operator.name for operator in subject.spec.stages[1].operators if operator.overwritten]
    assert changed == ["mm mlp.gate_proj"]
    assert_same(_outcome(subject, tmp_path / "kept", kept_there="room", **way), expected)


class _Made(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_products_are_computed_where_they_are_kept(tmp_path: Path) -> None:
    """Computes them without a copy, in the device as well."""
    subject = Subject(llama(num_hidden_layers=2), Shape(batch=4, micro=2))
    products = [o for stage in subject.spec.stages for o in stage.operators if o.kind == "mm"]
    counts = []
    for kept_there in (None, "room"):
        with Rig(subject, tmp_path / str(kept_there), home="cpu", device="emulated", kept_there=kept_there) as rig:  # type: ignore[arg-type]
            with _Made() as made:
                rig.step(*next(subject.batches(1)), 1, last=True)
            rig.executor.drain()
            counts.append(made.count)
    assert counts[1]["aten.mm.out"] == 2 * len(products) and counts[0]["aten.mm.out"] == 0
    assert counts[0]["aten.mm.default"] - counts[1]["aten.mm.default"] == 2 * 2 * len(products)  # recomputed, and in forward


def test_no_output_crosses(tmp_path: Path) -> None:
    """Bytes each way are those of recompute; where outputs rest with the boundary they are those and every output, once: no
    parameter that backward looks at is among them."""
    subject = Subject(llama(num_hidden_layers=3), Shape(batch=4, micro=2, tokens=32))  # no kernel pads
    outputs = sum(operator.bytes for stage in subject.spec.stages for operator in stage.operators)
    ways: dict[str, dict[str, Any]] = {
        "recompute": {}, "device": {"kept_there": every_operator(subject.spec)}, "boundary": {"kept": "all"},
    }  # fmt: skip
    moved = {}
    for name, way in ways.items():
        with Rig(subject, tmp_path / name, home="cpu", device="emulated", **way) as rig:
            rig.step(*next(subject.batches(1)), 1, last=True)
            rig.executor.drain()
            rig.device.synchronize()
            copies = rig.device.copies()
            moved[name] = [sum(copy.bytes for copy in copies if copy.up == up) for up in (True, False)]
    assert moved["device"] == moved["recompute"]
    assert moved["boundary"] == [before + 2 * outputs for before in moved["recompute"]]


@pytest.mark.parametrize("shape", [Shape(**UNEVEN), Shape(batch=2, micro=2, dtype="bfloat16")], ids=["uneven", "one"])
def test_memory_of_outputs_is_what_the_plan_charges(shape: Shape, tmp_path: Path) -> None:
    """Takes to the byte more than without, and never more than the plan."""
    subject = Subject(llama(), shape)
    every, way = every_operator(subject.spec), {"home": "cpu", "device": "emulated"}
    peaks, charged, limit = [], [], 0
    for number, kept_there in enumerate((None, every)):
        with Rig(subject, tmp_path / str(number), kept_there=kept_there, **way) as rig:  # type: ignore[arg-type]
            rig.run(2)
            peaks.append(rig.device.peak_memory())
            charged.append(device_memory(subject.spec, rig.request, rig.plan.stages).outputs)
            limit = rig.plan.predicted.gpu_peak
    assert peaks[1] - peaks[0] == charged[1] > charged[0] == 0
    with Rig(subject, tmp_path / "limit", kept_there=every, opened=EmulatedDevice(limit), **way) as rig:  # type: ignore[arg-type]
        rig.run(2)
    with pytest.raises(torch.OutOfMemoryError):
        Rig(subject, tmp_path / "less", kept_there=every, opened=EmulatedDevice(charged[1] - 1), **way)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_as_many_as_there_is_room_for(share: float, tmp_path: Path) -> None:
    """Keeps what fits a device that has no more than its limit."""
    subject = Subject(llama(num_hidden_layers=3), Shape(batch=4, micro=2))
    every, way = every_operator(subject.spec), {"home": "cpu", "device": "emulated"}
    with Rig(subject, tmp_path / "every", kept_there=every, **way) as rig:  # type: ignore[arg-type]
        charged = device_memory(subject.spec, rig.request, rig.plan.stages)
    operators = sum(map(len, every))
    rounding = 2 * 4096 * operators  # of each output of each micro-batch, where they are chosen
    limit = charged.total - charged.outputs + int(share * (charged.outputs + rounding))
    opened = EmulatedDevice(limit)
    with Rig(subject, tmp_path / "room", kept_there="room", gpu_budget=limit, opened=opened, **way) as rig:  # type: ignore[arg-type]
        rig.run(1)
        found = sum(len(stage.kept_there) for stage in rig.plan.stages)
        assert rig.plan.predicted.gpu_peak <= limit
    assert found == operators if share == 1 else found < operators
    assert bool(found) == bool(share)


def test_no_boundary_crosses(tmp_path: Path) -> None:
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
    stashed = one * sum(visit.stash for visit in rig.executor.visits.schedule.visits)
    assert moved[0] == [moved[1][0] + every, moved[1][1] + stashed] and stashed


@pytest.mark.parametrize("kept_there", [False, True])
def test_memory_of_boundaries_is_what_the_plan_charges(kept_there: bool, tmp_path: Path) -> None:
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
