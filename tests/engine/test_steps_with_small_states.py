"""Tests steps with bfloat16 and int8 states: what numpy makes of the same gradients, wherever states rest, in the bytes
planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from swap import small_states_reference

from fuyou_cli.spec.model import STATE_TILE, StateDtype, StateLayout
from fuyou_cli.swap.daemon import SwapDaemon, Update

from .comparing import Outcome, distance, relative
from .families import llama
from .rig import Rig, Shape, Subject, outcome

STEPS = 3
SMALL: tuple[StateDtype, ...] = ("bfloat16", "int8")
CONFIG = llama(hidden_size=128, intermediate_size=256)  # 164,000 parameters a block: two tiles, and one that ends early


@pytest.fixture(scope="module", params=SMALL)
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(CONFIG, Shape(states=request.param))


class Reference:
    """Lets numpy do every update beside the daemon, which it passes everything on to."""

    def __init__(self, daemon: SwapDaemon) -> None:
        self._daemon = daemon
        self.seeds: set[int] = set()
        self.states: dict[int, tuple[np.ndarray, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._daemon, name)

    def update(self, update: Update) -> int:
        arena, count = self._daemon._arena, update.params
        layout = StateLayout(weights="float32", dtype=update.states_dtype)
        if update.label not in self.states:
            master = np.frombuffer(arena.view(update.weights, 4 * count), np.float32).copy()
            sizes = (layout.size("momentum", count), layout.size("variance", count))
            self.states[update.label] = (master, *(np.zeros(size, np.uint8) for size in sizes))
        gradients = np.frombuffer(arena.view(update.gradients, 4 * count), np.float32)
        small_states_reference.adamw(update, *self.states[update.label], gradients)
        self.seeds.add(update.seed)
        return self._daemon.update(update)


def test_every_update_is_that_of_numpy(subject: Subject, tmp_path: Path) -> None:
    """Compares bit for bit, weights and states."""
    with Rig(subject, tmp_path, home="cpu", chunk=STATE_TILE, through=Reference) as rig:
        rig.run(STEPS)
        reference = rig.executor.visits.moves.daemon
        assert sorted(reference.states) == [stage.index for stage in rig.owning_stages()]
        assert reference.seeds == {subject.numerics.seed}
        for stage in rig.owning_stages():
            placed = rig.plan.stages[stage.index]
            for expected, ram in zip(
                reference.states[stage.index], (placed.weights_ram, placed.momentum_ram, placed.variance_ram), strict=True
            ):
                got = rig.memory.tensor(ram, torch.uint8).numpy()
                np.testing.assert_array_equal(got, expected.view(np.uint8))


@pytest.fixture(scope="module")
def with_float32_states(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return outcome(Subject(llama(), Shape()), tmp_path_factory.mktemp("float32"), 20, home="cpu")


def test_they_learn_as_float32_states_do(subject: Subject, with_float32_states: Outcome, tmp_path: Path) -> None:
    """bfloat16 keeps 8 bits of a state, int8 about 7 of its root: a step differs by percents, and errors of steps add up to
    little, as they have no direction."""
    small = Subject(llama(), Shape(states=subject.shape.states))
    losses, weights = outcome(small, tmp_path / "small", 20, home="cpu", chunk=STATE_TILE)
    whole, expected = with_float32_states
    assert whole[-1] < 0.9 * whole[0]
    assert relative(losses, whole) < 0.02
    assert 0 < distance(weights, expected) < 0.02
