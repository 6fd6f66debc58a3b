"""Tests that what rests on the device and is updated there gives the bits of a run through host memory, and moves nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
import torch
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.core.errors import NumericsError
from fuyou_cli.engine.devices.base import Event
from fuyou_cli.engine.updates import StagedCopies
from fuyou_cli.planner.bound import copied_bytes
from fuyou_cli.planner.costs import Costs
from fuyou_cli.spec.model import Dtype
from fuyou_cli.spec.plan import Span, Tier
from fuyou_cli.swap.kernels import checksum
from tests.emulated import EmulatedDevice

from .comparing import Outcome, assert_same
from .families import llama
from .measuring import copied_in_a_step
from .rig import HARDWARE, OPTIMIZER, SPARE, Rig, Shape, Subject

STEPS = 2  # the second one begins with what updates left, wherever they were done
PIECE = 4096  # bytes: the least that the store takes


class _ByWayOfHost:
    """Holds a subject, and what a run gives of which nothing rests on the device: the same for all others."""

    def __init__(self, dtype: Dtype, tied: bool) -> None:
        self._tied = tied
        config = llama(num_hidden_layers=2, tie_word_embeddings=tied)
        self.subject = Subject(config, Shape(dtype=dtype, vocabulary=40 * tied, accumulate=dtype))
        self._wanted: dict[tuple[float | None, int], Outcome] = {}

    def outcome(self, clip: float | None, sweeps: int, folder: Path) -> Outcome:
        sweeps = sweeps if self._tied else 1  # a tied head's sums alone depend on it
        if (clip, sweeps) not in self._wanted:
            with Rig(self.subject, folder, device="emulated", home="cpu", clip=clip, sweeps=sweeps) as rig:
                self._wanted[clip, sweeps] = rig.run(STEPS), rig.weights()
        return self._wanted[clip, sweeps]


@pytest.fixture(scope="module")
def by_way_of_host() -> Callable[[Dtype, bool], _ByWayOfHost]:
    return cache(_ByWayOfHost)


@examples(8, share_fixtures=True)
@given(
    dtype=st.sampled_from(["float32", "bfloat16"]), tied=st.booleans(), clip=st.sampled_from([0.5, None]),
    there=st.sets(st.integers(0, 8)), home=st.sampled_from(["ssd", "cpu", None]), lookahead=st.integers(1, 3),
    defer=st.booleans(), stays=st.booleans(), sweeps=st.sampled_from([1, 2]),
    kept_there=st.sampled_from([None, "room"]),
)  # fmt: skip
def test_any_mix_of_homes_is_the_same_run(
    dtype: Dtype, tied: bool, clip: float | None, there: set[int], home: Tier | None, lookahead: int, defer: bool, stays: bool,
    sweeps: int, kept_there: Literal["room"] | None,
    by_way_of_host: Callable[[Dtype, bool], _ByWayOfHost], tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """Gives the same bits; and a device never has more in use than the plan says."""
    known = by_way_of_host(dtype, tied)
    way: dict[str, Any] = {
        "home": home, "clip": clip, "lookahead": lookahead, "defer": None if clip else defer, "batch_on_device": stays,
        "sweeps": sweeps, "kept_there": kept_there, "gpu_budget": 1 << 30,
        "device_states": tuple(stage for stage in sorted(there) if stage < len(known.subject.spec.stages)),
    }  # fmt: skip
    with TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as folder:  # none is left: there may be thousands
        with Rig(known.subject, Path(folder, "device"), device="emulated", **way) as rig:
            found = rig.run(STEPS), rig.weights()
            assert rig.device.peak_memory() <= rig.plan.predicted.gpu_peak + SPARE
        assert_same(found, known.outcome(clip, sweeps, Path(folder, "host")))


@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.parametrize("there", [(0, 1, 2, 3, 4, 5), (1, 3)])
def test_a_step_copies_what_its_plan_says(there: tuple[int, ...], clip: float | None, tmp_path: Path) -> None:
    """Of stages that rest there, nothing but what their blocks keep for backward; the update reads and writes there."""
    subject = Subject(llama(num_hidden_layers=3), Shape(dtype="bfloat16"))
    with Rig(subject, tmp_path, device="emulated", home="cpu", device_states=there, clip=clip) as rig:
        charged = copied_bytes(
            Costs.of(rig.spec, HARDWARE, rig.plan), rig.executor.visits.schedule.visits, stages=rig.plan.stages
        )
        up, down = copied_in_a_step(rig, number=2)
        elsewhere = sum(stage.params for stage in rig.spec.stages if stage.index not in there)
        assert rig.counters().update_params == 2 * elsewhere
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


class _HeldBack(EmulatedDevice):
    """Holds the next copy to the host back, once `holds` is set, until `let_on`. Those behind it arrive meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.holds = 0, False
        self.held: _Held | None = None

    def download(self, device: torch.Tensor, host: torch.Tensor, *, bulk: bool = False) -> Event:
        self.asked += 1
        if self.held is not None or not self.holds:
            return super().download(device, host, bulk=bulk)
        self.held = _Held(device, host)
        return self.held


class _Held(Event):
    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._source, self._target, self._made = source, target, False

    def done(self) -> bool:
        return self._made

    def let_on(self) -> None:
        self._target.copy_(self._source)
        self._made = True


def test_pieces_that_are_over_before_an_earlier_one_make_way_and_are_summed(tmp_path: Path) -> None:
    """Holds the first piece of a tensor back until all later ones are written, as may happen between a GPU's streams."""
    subject, device = Subject(llama(num_hidden_layers=1), Shape(dtype="bfloat16")), _HeldBack()
    with Rig(subject, tmp_path, device="emulated", opened=device, home="gpu", boundaries="cpu") as rig:
        rig.run(1)
        states, whole = rig.executor.visits.states, rig.plan.staging_slots[0]
        slots = tuple(Span(offset=whole.offset + number * PIECE, size=PIECE) for number in range(3))
        copies = StagedCopies(slots=slots, daemon=rig.daemon, memory=rig.memory, device=device)
        extents = states.at_rest(1, 1)
        pieces = sum(-(-extent.size // PIECE) for _, extent in extents.values())
        assert pieces > 2 * len(extents)
        copy, asked, device.holds = copies.begin(1, extents), device.asked, True
        while device.asked - asked < pieces or len(copies.free) < 2:
            assert copy.advance() is None
        assert device.held is not None
        device.held.let_on()
        sums = copy.finish(time.sleep)
        for name, (tensor, extent) in extents.items():
            back = torch.empty_like(tensor)
            assert sums[name] == checksum(tensor.numpy().data) == copies.fetch(1, back, extent), name
            assert torch.equal(back, tensor), name
        copies.close()
