"""Tests a run whose weights, states and gradients rest on the device: the same bits, in files that any other run can go on
from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from drawn import every

from fuyou_cli.core.errors import Interrupted, UsageError
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.plan_step import plan
from fuyou_cli.training.state.manifest import TENSORS
from tests.emulated import EmulatedDevice

from .conftest import NewProject, Whole
from .running import STEPS, interrupt, prepared_run, run_of, sums, train

HOST = {"offload.device": "emulated", "offload.weights": "cpu", "offload.optimizer_states": "cpu", "offload.gradients": "cpu"}
THERE = HOST | {"offload.weights": "gpu", "offload.optimizer_states": "gpu", "offload.gradients": "gpu"}
ON_A_GPU = {"offload.device": "cuda", "train.deterministic": True}  # whose last bits else differ from run to run
WHERE = [{}, pytest.param(ON_A_GPU, marks=pytest.mark.gpu)]
WAYS: tuple[dict[str, Any], ...] = (
    {}, {"train.clip_grad_norm": None}, {"precision.compute": "float32"}, {"checkpoint.commit_every_steps": None},
)  # fmt: skip


@pytest.mark.parametrize("where", WHERE, ids=["emulated", "cuda"])
@pytest.mark.parametrize("way", every(2, WAYS))
def test_the_same_bits_rest_on_the_store(way: dict[str, Any], where: dict[str, Any], whole: Callable[..., Whole]) -> None:
    ours, theirs = whole({**THERE, **way, **where}), whole({**HOST, **way, **where})
    assert ours.losses == theirs.losses
    assert sums(ours.store) == sums(theirs.store)
    tensors = set(TENSORS) - {"frozen"} - ({"remainder"} if "precision.compute" in way else set())
    assert {tensor for _, tensor, _ in sums(ours.store)} == tensors


@pytest.mark.parametrize("where", WHERE, ids=["emulated", "cuda"])
@pytest.mark.parametrize(("first", "then"), [(THERE, HOST), (HOST, THERE)])
def test_a_run_goes_on_with_other_homes(
    first: dict[str, str], then: dict[str, str], where: dict[str, Any], new_project: NewProject, whole: Callable[..., Whole]
) -> None:
    project = new_project(changes={**first, **where, "train.max_steps": STEPS})
    with pytest.raises(Interrupted):
        train(project, interrupt(4, "backward"))
    project.write_recipe({**then, **where, "train.max_steps": STEPS})
    losses, store = train(project)
    expected = whole({**HOST, **where})
    assert losses == expected.losses
    assert sums(store) == sums(expected.store)


def test_nothing_of_it_is_in_ram(new_project: NewProject) -> None:
    made = prepared_run(new_project(changes=THERE)).planned.plan
    assert not any(slots.weight_slots or slots.gradient_slots for slots in made.slot_classes)
    assert all(not (stage.weights_ram or stage.momentum_ram or stage.gradients_ram) for stage in made.stages)
    assert made.predicted.read_by["states"] == made.predicted.read_by["weights"] == 0


@pytest.mark.parametrize(("limit", "clip"), every(3, product(["1400KiB", "64MiB"], [0.5, None])))
def test_a_device_is_filled_and_never_passed(
    limit: str, clip: float | None, new_project: NewProject, whole: Callable[..., Whole]
) -> None:
    """Plans for a machine whose copies are slow: the same bits, within what the plan has of the device."""
    same = {"train.clip_grad_norm": clip, "train.max_steps": STEPS}
    auto = {key: "auto" for key in (*THERE, "offload.boundaries") if key != "offload.device"}
    project = new_project(changes={**THERE, **auto, **same, "offload.max_memory.gpu": limit})
    ready = prepared_run(project)
    slow = replace(ready.planned.hardware, h2d=1e6, d2h=1e6, measured="described")
    ready = replace(ready, planned=plan(ready.planned, slow, say=lambda text: None))
    with run_of(ready) as run:
        run.load(lambda count: None)
        run.train(lambda report: None)
        assert isinstance(run.device, EmulatedDevice)
        most = load_recipe(project.recipe).recipe.offload.max_memory.gpu.resolve(total=0, auto=0)
        assert run.device.peak_memory() <= run.plan.predicted.gpu_peak <= most
        assert any(stage.updated_there for stage in run.plan.stages)
        assert run.losses == whole({**HOST, **same}).losses


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"offload.optimizer_states": "cpu"}, "gradients: gpu` also needs the optimizer states"),
        ({"offload.weights": "cpu"}, "weights: cpu` but `offload.optimizer_states: gpu`"),
        ({"offload.gradients": "ssd"}, "gradients: ssd` but `offload.optimizer_states: gpu`"),
        ({"offload.device": "cpu", "offload.optimizer_states": "gpu"}, "gpu` needs a GPU, but"),
        ({"optimizer.state_dtype": "int8"}, "state_dtype: int8` is updated on the CPU only"),
        ({"optimizer.name": "lion"}, "name: lion` is updated on the CPU only"),
    ],
)
def test_what_contradicts_is_refused_by_key(changes: dict[str, str], what: str, new_project: NewProject) -> None:
    project = new_project(changes={**THERE, **changes})
    with pytest.raises(UsageError, match=what):
        load_recipe(project.recipe)
