"""Outputs that stay in the device's memory: not a bit of the result changes, nothing crosses for them, and no byte is taken
that the plan does not charge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from drawn import every, examples
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.describe import inspect
from fuyou_cli.planner.boundary_layout import every_operator
from fuyou_cli.planner.device_memory import device_memory
from fuyou_cli.spec.model import Dtype
from tests.emulated import EmulatedDevice

from .comparing import Outcome, assert_same
from .families import FAMILIES, gpt2, llama
from .late import make_late
from .rig import Rig, Shape, Subject
from .test_kept_outputs import UNEVEN, _changing, _outcome, _two_steps_one_given_up


@pytest.mark.parametrize("family", every(3, FAMILIES))
def test_bitwise_recompute(family: str, tmp_path: Path) -> None:
    dtype: Dtype = ("float32", "bfloat16")[list(FAMILIES).index(family) % 2]  # type: ignore[assignment]
    subject = Subject(FAMILIES[family], Shape(dtype=dtype, accumulate=dtype, **UNEVEN))
    expected = _outcome(subject, tmp_path / "recompute")
    every = every_operator(subject.spec)
    assert_same(_outcome(subject, tmp_path / "kept", kept_there=every, device="emulated"), expected)


class _Recomputed:
    """Returns outcomes of recompute, made once, of a model that draws random numbers between its operators."""

    def __init__(self, folder: Callable[[str], Path]) -> None:
        self._folder = folder
        self._subjects: dict[Dtype, Subject] = {}
        self._outcomes: dict[tuple[Dtype, float | None], Outcome] = {}

    def subject(self, dtype: Dtype) -> Subject:
        if dtype not in self._subjects:
            self._subjects[dtype] = Subject(gpt2(dropout=0.1), Shape(dtype=dtype, **UNEVEN))
        return self._subjects[dtype]

    def outcome(self, dtype: Dtype, clip: float | None) -> Outcome:
        if (dtype, clip) not in self._outcomes:
            self._outcomes[dtype, clip] = _outcome(self.subject(dtype), self._folder("recompute"), clip=clip)
        return self._outcomes[dtype, clip]


@pytest.fixture(scope="module")
def recomputed(tmp_path_factory: pytest.TempPathFactory) -> _Recomputed:
    return _Recomputed(tmp_path_factory.mktemp)


@examples(8, share_fixtures=True)
@given(data=st.data())
def test_any_places(data: st.DataObject, recomputed: _Recomputed, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps each operator's output on the device, with the boundary, or nowhere: there are 5,832 ways."""
    clip = data.draw(st.sampled_from([0.5, None]))
    dtype: Dtype = "bfloat16" if clip else "float32"
    subject = recomputed.subject(dtype)
    places = [[(o.index, data.draw(st.sampled_from("dbn"))) for o in stage.operators] for stage in subject.spec.stages]
    kept_there, kept = (tuple(tuple(o for o, place in some if place == name) for some in places) for name in "db")
    way = {
        "boundaries": data.draw(st.sampled_from(["cpu", "ssd"])), "batch_on_device": data.draw(st.booleans()),
        "device": "emulated", "clip": clip, "kept": kept, "kept_there": kept_there,
    }  # fmt: skip
    with TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as folder:
        assert_same(_outcome(subject, Path(folder), **way), recomputed.outcome(dtype, clip))


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


def test_nothing_crosses_for_them(tmp_path: Path) -> None:
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
def test_memory_is_what_the_plan_charges(shape: Shape, tmp_path: Path) -> None:
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


def test_a_step_given_up_leaves_nothing_behind(tmp_path: Path) -> None:
    subject = Subject(llama(), Shape())
    expected = _outcome(subject, tmp_path / "whole")
    every = every_operator(subject.spec)
    with Rig(subject, tmp_path / "broken", home="cpu", device="emulated", kept_there=every) as rig:
        _two_steps_one_given_up(rig, subject)
        assert_same((rig.losses, rig.weights()), expected)
