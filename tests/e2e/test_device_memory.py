"""Tests that a device's memory is what the recipe says: a run has no more of it, running out names the key and the bytes, and
states may rest there."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from drawn import every

from fuyou_cli.cli import error_screen
from fuyou_cli.core.errors import DeviceMemoryError, OutOfSpaceError, UsageError
from fuyou_cli.core.units import gib
from fuyou_cli.engine.devices.cuda import PinnedMemory
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.plan_step import plan
from fuyou_cli.training.run import Run, naming_device_errors
from fuyou_cli.training.state.manifest import TENSORS
from fuyou_cli.training.state.store_folders import STORE_FILE
from tests.emulated import EmulatedDevice

from .conftest import NewProject, WholeOf
from .running import STEPS, interrupt, loaded_run, prepared_run, run_of, stop, sums, train

MiB = 1 << 20
EMULATED = {"train.max_steps": STEPS, "offload.device": "emulated"}


def test_a_step_that_runs_out_names_the_key_and_is_gone_on_from(
    new_project: NewProject, capsys: pytest.CaptureFixture[str], whole: WholeOf
) -> None:
    project = new_project(changes={**EMULATED, "offload.max_memory.gpu": "64MiB"})
    planned = gib(prepared_run(project).planned.plan.predicted.gpu_peak)

    def take_all(run: Run) -> None:
        assert isinstance(run.device, EmulatedDevice)
        assert run.step == 3 or run.device._memory.limit == 64 * MiB
        if run.step == 3:
            run.device._memory.limit = 0

    with pytest.raises(DeviceMemoryError, match=r"^step 4, forward of .*: out of device memory: ") as ended:
        train(project, take_all)
    assert f"; {planned} are planned, " in ended.value.message
    assert ended.value.message.endswith(" in use, 64 MiB are allowed (offload.max_memory.gpu)")
    assert "the state after step 3 is saved" in str(ended.value.hint)
    assert "micro_batch_size" not in str(ended.value.hint)  # a saved run has its size
    assert error_screen.report(ended.value) == 4 and "offload.max_memory.gpu" in capsys.readouterr().err
    project.write_recipe({**EMULATED, "offload.max_memory.gpu": "128MiB"})
    assert train(project)[0] == whole(EMULATED).losses


def test_outputs_that_stay_there_change_no_loss(new_project: NewProject, whole: WholeOf) -> None:
    """Keeps outputs as the recipe asks, as far as the device has room; all of it is within the limit at any time."""
    keeping = {**EMULATED, "offload.max_memory.gpu": "64MiB", "offload.activations": "keep"}
    project, peaks = new_project(changes=keeping), list[int]()
    plan = prepared_run(project).planned.plan
    assert any(stage.kept_there for stage in plan.stages) and not any(stage.kept for stage in plan.stages)
    losses, _ = train(project, lambda run: peaks.append(run.device.peak_memory()))
    assert losses == whole(EMULATED).losses
    assert plan.predicted.gpu_peak - plan.predicted.gpu_peak // 2 < max(peaks) <= plan.predicted.gpu_peak <= 64 * MiB


def test_a_run_does_not_open_beyond_its_limit(new_project: NewProject) -> None:
    """Refuses as where others have taken the device since it was planned for."""
    project = new_project(changes=EMULATED)
    less = load_recipe(project.recipe, ["offload.max_memory.gpu=1KiB"]).recipe
    prepared = prepared_run(project)
    prepared = replace(prepared, planned=replace(prepared.planned, recipe=less))
    with (
        pytest.raises(DeviceMemoryError, match=r"^loading: out of device memory: .*offload\.max_memory\.gpu"),
        run_of(prepared),
    ):
        pytest.fail("it opened")


class _Card(EmulatedDevice):
    """Stands for a card of which others have some."""

    def __init__(self, *, limit: int, free: int) -> None:
        super().__init__(limit)
        self.free = free

    def free_memory(self) -> int:
        return self.free


@pytest.mark.parametrize(
    ("limit", "free", "advice"),
    [
        (10 * MiB, 1 * MiB, "other processes now use some of the GPU's memory: set offload.max_memory.gpu to less than 5 MiB"),
        (10 * MiB, 36 * MiB, "raise offload.max_memory.gpu: this process can use 40 MiB of the GPU"),
        (10 * MiB, 6 * MiB, "the step needs more than planned"),
    ],
)
@pytest.mark.parametrize("words", ["CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", "CUDA error: out of memory", None])
def test_what_to_do_depends_on_what_is_there(
    new_project: NewProject, words: str | None, limit: int, free: int, advice: str
) -> None:
    plan = prepared_run(new_project(changes=EMULATED)).planned.plan
    device = _Card(limit=limit, free=free)
    held = device.empty(4 * MiB)
    with pytest.raises(DeviceMemoryError) as ended, naming_device_errors(device, plan, limit, lambda: "here"):
        raise RuntimeError(words) if words else torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has")
    assert str(ended.value.hint).startswith(advice) and held.numel()
    assert "4 MiB in use, 10 MiB are allowed (offload.max_memory.gpu)" in ended.value.message
    with pytest.raises(RuntimeError, match=r"^another$"), naming_device_errors(device, plan, limit, lambda: "here"):
        raise RuntimeError("another")
    device.close()


def test_memory_that_cannot_be_pinned_ends_a_run_before_it_loads(
    new_project: NewProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = PinnedMemory(lambda address, size: False, lambda address: None)
    monkeypatch.setattr(EmulatedDevice, "pin", lambda self, host: pinned.pin(host))
    prepared = prepared_run(new_project(changes=EMULATED))
    with pytest.raises(OutOfSpaceError, match=r"cannot pin .* of host memory"):
        Run(prepared)
    assert not (prepared.planned.directories[0] / STORE_FILE).exists()


# ---- states that rest there ----------------------------------------------------------------------------------------------


HOST = {"offload.device": "emulated", "offload.weights": "cpu", "offload.optimizer_states": "cpu", "offload.gradients": "cpu"}
THERE = HOST | {"offload.weights": "gpu", "offload.optimizer_states": "gpu", "offload.gradients": "gpu"}
ON_A_GPU = {"offload.device": "cuda", "train.deterministic": True}  # whose last bits else differ from run to run
WHERE = [{}, pytest.param(ON_A_GPU, marks=pytest.mark.gpu)]
WAYS: tuple[dict[str, Any], ...] = (
    {}, {"train.clip_grad_norm": None}, {"precision.compute": "float32"}, {"checkpoint.commit_every_steps": None},
)  # fmt: skip


@pytest.mark.parametrize("where", WHERE, ids=["emulated", "cuda"])
@pytest.mark.parametrize("way", every(2, WAYS))
def test_the_same_bits_rest_on_the_store(way: dict[str, Any], where: dict[str, Any], whole: WholeOf) -> None:
    ours, theirs = whole({**THERE, **way, **where}), whole({**HOST, **way, **where})
    assert ours.losses == theirs.losses
    assert sums(ours.store) == sums(theirs.store)
    tensors = set(TENSORS) - {"frozen"} - ({"remainder"} if "precision.compute" in way else set())
    assert {tensor for _, tensor, _ in sums(ours.store)} == tensors


@pytest.mark.parametrize("where", WHERE, ids=["emulated", "cuda"])
@pytest.mark.parametrize(("first", "then"), [(THERE, HOST), (HOST, THERE)])
def test_a_run_goes_on_with_other_homes(
    first: dict[str, str], then: dict[str, str], where: dict[str, Any], new_project: NewProject, whole: WholeOf
) -> None:
    project = new_project(changes={**first, **where, "train.max_steps": STEPS})
    stop(project, interrupt(4, "backward"))
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
def test_a_device_is_filled_and_never_passed(limit: str, clip: float | None, new_project: NewProject, whole: WholeOf) -> None:
    """Plans for a machine whose copies are slow: the same bits, within what the plan has of the device."""
    same = {"train.clip_grad_norm": clip, "train.max_steps": STEPS}
    auto = {key: "auto" for key in (*THERE, "offload.boundaries") if key != "offload.device"}
    project = new_project(changes={**THERE, **auto, **same, "offload.max_memory.gpu": limit})
    ready = prepared_run(project)
    slow = replace(ready.planned.hardware, h2d=1e6, d2h=1e6, measured="described")
    ready = replace(ready, planned=plan(ready.planned, slow, say=lambda text: None))
    with loaded_run(ready) as run:
        run.train(lambda report: None)
        assert isinstance(run.device, EmulatedDevice)
        most = load_recipe(project.recipe).recipe.offload.max_memory.gpu.resolve(total=0, auto=0)
        assert run.device.peak_memory() <= run.plan.predicted.gpu_peak <= most
        assert any(stage.updated_on_device for stage in run.plan.stages)
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
