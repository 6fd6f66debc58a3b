"""Tests a run whose blocks are compiled (traced and differentiated by the compiler, its operators run one by one here), and one
that repeats itself on a GPU: what is asked of torch, on the emulated device, and what torch refuses."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fuyou_cli.core.errors import UsageError
from fuyou_cli.engine.compiled import CompiledBlocks
from fuyou_cli.machine.profile import assumed_hardware
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.spec.hardware import StageRate
from fuyou_cli.training import run as runs
from fuyou_cli.training.plan_step import settle
from fuyou_cli.training.prepare import fetch, tokenise
from fuyou_cli.training.run import Run

from .conftest import NewProject, WholeOf
from .running import STEPS, interrupt, loaded_run, planned, silent, stop, train

COMPILED = {"train.max_steps": STEPS, "train.compile": True}


@pytest.fixture(autouse=True)
def _one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets what was compiled before, too: a process has eight of a kind, and a command one."""
    monkeypatch.setattr(runs, "CompiledBlocks", partial(CompiledBlocks, "aot_eager"))
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.mark.slow
def test_it_learns_alike_and_resumes_alike(new_project: NewProject, whole: WholeOf) -> None:
    project = new_project(changes=COMPILED)
    losses, _ = train(project)
    assert losses == pytest.approx(whole({"train.max_steps": STEPS}).losses, rel=1e-4)
    stopped = new_project("stopped", COMPILED)
    stop(stopped, interrupt(3, "forward"))
    assert train(stopped)[0] == losses


@pytest.mark.parametrize("more", [{}, {"model.quantize": "nf4", "adapter": {"r": 4}}], ids=["full", "adapter on nf4"])
@pytest.mark.slow
def test_graphs_that_stay_on_the_device_change_nothing(new_project: NewProject, llama: Path, more: dict[str, Any]) -> None:
    """Neither a loss, nor what a run goes on with that is resumed without them."""
    emulated = {**COMPILED, "offload.device": "emulated", "model.name_or_path": str(llama), **more}
    recomputed, _ = train(new_project(changes={**emulated, "offload.activations": "recompute"}))
    project = new_project("kept", {**emulated, "offload.activations": "keep"})
    stop(project, interrupt(3, "forward"))
    project.write_recipe({**emulated, "offload.activations": "recompute"})
    assert train(project)[0] == recomputed


def test_graphs_that_are_larger_than_planned_are_told_of_once(new_project: NewProject, llama: Path) -> None:
    """Plans with a size that was measured much too small."""
    keys = {"train.max_steps": 2, "offload.device": "emulated", "model.name_or_path": str(llama), "offload.activations": "keep"}
    recipe = load_recipe(new_project(changes={**COMPILED, **keys}).recipe).recipe
    hardware = assumed_hardware(device="emulated")
    model = planned(recipe, hardware).model
    block = next(stage for stage in model.stages if stage.kind == "block")
    small = StageRate(
        kind="compiled block", dtype=model.compute_dtype, hidden=model.hidden_size, params=block.params, tokens=1 << 20,
        forward=1e12, backward=1e12, graph=1 << 20,
    )  # fmt: skip
    hardware = replace(hardware, stage_rates=(small,))
    ready = settle(tokenise(fetch(planned(recipe, hardware, to_run=True), say=silent), say=silent), hardware)
    assert sum(bool(stage.kept_there) for stage in ready.planned.plan.stages) > 1
    told: list[str] = []
    with loaded_run(ready, announce=told.append) as run:
        run.train(lambda report: None)
    (note,) = (text for text in told if "graph" in text)
    assert note.startswith("note: ") and "fuyou bench RECIPE" in note and run.step == 2


# ---- compute that repeats itself -----------------------------------------------------------------------------------------


EMULATED = {"train.max_steps": STEPS, "offload.device": "emulated"}
REPEATED = {**EMULATED, "train.deterministic": True}


def _asked() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), bool(torch.utils.deterministic.fill_uninitialized_memory)


def test_torch_is_asked_while_the_run_lasts(new_project: NewProject, whole: WholeOf) -> None:
    """Checks that memory is not filled for it; the CPU's bits are those without it."""
    before, seen = _asked(), set[tuple[bool, bool]]()
    losses = train(new_project(changes=REPEATED), lambda run: seen.add(_asked()))[0]
    assert seen == {(True, False)}
    assert _asked() == before
    assert losses == whole(EMULATED).losses


def test_an_operator_without_such_a_kernel_is_named(new_project: NewProject) -> None:
    def scatter(run: Run) -> None:
        torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))

    with pytest.raises(UsageError, match=r"^train\.deterministic: put_ has no deterministic kernel here$"):
        train(new_project(changes=REPEATED), scatter)


@pytest.mark.parametrize("key", [pytest.param("compile", marks=pytest.mark.slow), "deterministic"])
def test_a_saved_run_is_gone_on_with_alike(key: str, new_project: NewProject) -> None:
    project = new_project(changes={**EMULATED, f"train.{key}": True})
    train(project)
    project.write_recipe(EMULATED)
    with pytest.raises(UsageError, match=rf"train\.{key}.* changed since it was saved"):
        train(project)
