"""Tests a run whose blocks are compiled: traced and differentiated by the compiler, its operators run one by one here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fuyou_cli.core.errors import Interrupted, UsageError
from fuyou_cli.engine.compiled import CompiledBlocks
from fuyou_cli.machine.profile import assumed_hardware
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.spec.hardware import StageRate
from fuyou_cli.training import run as runs
from fuyou_cli.training.plan_step import settle
from fuyou_cli.training.prepare import fetch, tokenise

from .conftest import NewProject, Whole
from .running import STEPS, interrupt, planned, run_of, silent, train

COMPILED = {"train.max_steps": STEPS, "train.compile": True}


@pytest.fixture(autouse=True)
def _one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "CompiledBlocks", partial(CompiledBlocks, "aot_eager"))


@pytest.mark.slow
def test_it_learns_alike_and_resumes_alike(new_project: NewProject, whole: Callable[..., Whole]) -> None:
    project = new_project(changes=COMPILED)
    losses, _ = train(project)
    assert losses == pytest.approx(whole({"train.max_steps": STEPS}).losses, rel=1e-4)
    stopped = new_project("stopped", COMPILED)
    with pytest.raises(Interrupted):
        train(stopped, interrupt(3, "forward"))
    assert train(stopped)[0] == losses


@pytest.mark.slow
def test_a_saved_run_is_gone_on_with_alike(new_project: NewProject) -> None:
    project = new_project(changes=COMPILED)
    train(project)
    project.write_recipe({**COMPILED, "train.compile": False})
    with pytest.raises(UsageError, match=r"train\.compile changed since it was saved"):
        train(project)


@pytest.mark.parametrize("more", [{}, {"model.quantize": "nf4", "adapter": {"r": 4}}], ids=["full", "adapter on nf4"])
@pytest.mark.slow
def test_graphs_that_stay_on_the_device_change_nothing(new_project: NewProject, llama: Path, more: dict[str, Any]) -> None:
    """Neither a loss, nor what a run goes on with that is resumed without them."""
    emulated = {**COMPILED, "offload.device": "emulated", "model.name_or_path": str(llama), **more}
    recomputed, _ = train(new_project(changes={**emulated, "offload.activations": "recompute"}))
    project = new_project("kept", {**emulated, "offload.activations": "keep"})
    with pytest.raises(Interrupted):
        train(project, interrupt(3, "forward"))
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
    with run_of(ready, announce=told.append) as run:
        run.load(lambda count: None)
        run.train(lambda report: None)
    (note,) = (text for text in told if "graph" in text)
    assert note.startswith("note: ") and "fuyou bench RECIPE" in note and run.step == 2
