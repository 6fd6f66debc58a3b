"""Tests a run whose blocks are compiled: traced and differentiated by the compiler, its operators run one by one here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fuyou_cli.core.errors import Interrupted, UsageError
from fuyou_cli.engine.compiled import CompiledBlocks
from fuyou_cli.training import run as runs

from .conftest import NewProject, Whole
from .running import STEPS, interrupt, train

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
