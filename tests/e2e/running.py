"""Runs in this process that stop where a test says."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fuyou_cli.checkpoint.hub import Progress
from fuyou_cli.core.errors import Interrupted
from fuyou_cli.machine.profile import assumed_hardware
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.recipe.schema import Recipe
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.training.exporting import export_store
from fuyou_cli.training.plan_step import plan, settle
from fuyou_cli.training.prepare import Planned, Ready, fetch, inspect, resolve, tokenise, unheard
from fuyou_cli.training.run import Run
from fuyou_cli.training.state import manifest as manifests
from fuyou_cli.training.state.at_rest import saved_store
from fuyou_cli.training.state.manifest import Manifest
from tests.engine.comparing import unequal

from .conftest import Project

STEPS = 6
Between = Callable[[Run], None]


def silent(text: str) -> None:
    pass


def planned(
    recipe: Recipe, hardware: HardwareProfile | None = None, *, to_run: bool = False, here: bool = True,
    say: Callable[[str], None] = silent, **options: Any,
) -> Planned:  # fmt: skip
    """Plans for a machine, or for this one with assumed rates."""
    inspected = inspect(resolve(recipe, to_run=to_run, here=here, say=say), say=say)
    return plan(inspected, hardware or assumed_hardware(device=inspected.device), say=say, **options)


def prepared_run(
    project: Project, *, say: Callable[[str], None] = silent, progress: Progress = unheard, accept_changes: bool = False
) -> Ready:
    recipe = load_recipe(project.recipe).recipe
    inspected = inspect(resolve(recipe, say=say, progress=progress), say=say)
    first = plan(inspected, assumed_hardware(device=inspected.device), say=say)
    tokenised = tokenise(fetch(first, say=say, progress=progress), say=say, accept_changes=accept_changes)
    return settle(tokenised, assumed_hardware(device=inspected.device))


def run_of(what: Project | Ready, **options: Any) -> Run:
    """Returns the run of a project, or of one that is prepared. Its user opens and closes it."""
    ready = prepared_run(what) if isinstance(what, Project) else what
    return Run(ready, **options)


@contextmanager
def loaded_run(what: Project | Ready, **options: Any) -> Iterator[Run]:
    """Opens it, loads what it goes on from or its model, and closes it."""
    with run_of(what, **options) as run:
        run.load(lambda count: None)
        yield run


def train(
    project: Project | Ready, between: Between | None = None, *, say: Callable[[str], None] = silent
) -> tuple[list[float], Path]:
    """Runs steps to the end, or until `between` (called between micro-batches) stops it; returns losses and the store's folder.
    `say`: gets the run's messages."""
    with loaded_run(project, announce=say) as run:
        if between is not None:
            look = run.executor.between_micro_batches

            def look_and_act() -> None:
                between(run)
                look()

            run.executor.between_micro_batches = look_and_act
        run.train(lambda report: None)
        return run.losses, run.store.paths[0].parent


def stop(what: Project | Ready, between: Between) -> None:
    """Runs steps until `between` stops it."""
    with pytest.raises(Interrupted):
        train(what, between)


def interrupt(step: int, phase: str) -> Between:
    """Sends Ctrl-C at the second micro-batch of `phase` in `step` (1 for the first): in the first block, or a cut head's second
    piece."""
    seen: list[int] = []

    def between(run: Run) -> None:
        visit = run.executor.visits.schedule.visits[run.executor.visits.lookahead.cursor]
        kind = "head" if phase in ("logits", "head") else "block"
        stages = [stage.index for stage in run.model.stages if stage.kind == kind]
        if run.step + 1 == step and visit.phase == phase and visit.stage == stages[kind == "head"]:
            seen.append(visit.stage)
            if len(seen) == 2:
                os.kill(os.getpid(), signal.SIGINT)

    return between


def exported(store: Path, target: Path) -> dict[str, torch.Tensor]:
    paths = export_store(saved_store(store), target, dtype="float32", max_shard_size=1 << 30)
    return {name: value for path in paths for name, value in load_file(path).items()}


def assert_same_exports(ours: Path, theirs: Path, folder: Path) -> None:
    """Compares the weights of two stores bit for bit, by what they export to `folder`."""
    assert unequal(exported(ours, folder / "ours"), exported(theirs, folder / "theirs")) == []


def sums(store: Path) -> list[tuple[str, str, int]]:
    """Returns stage, tensor and checksum of everything that the newest manifest names."""
    saved = manifests.read(store)
    assert saved is not None
    return [(stage.name, tensor, extent.sum) for stage in saved.stages for tensor, extent in stage.extents()]


def manifest_of(project: Project) -> Manifest:
    stores = [path for path in project.folder.rglob(manifests.NAME)]
    assert len(stores) == 1
    found = manifests.read(stores[0].parent)
    assert found is not None
    return found


def store_of(project: Project) -> Path:
    """The folder of its one manifest."""
    (found,) = project.folder.rglob(manifests.NAME)
    return found.parent
