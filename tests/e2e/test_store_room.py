"""The store that a search may choose: what the disks have for it, whatever the run holds of them already."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fuyou_cli.advice import room as room_module
from fuyou_cli.advice.room import described_store_room, plan_problems, room_of, store_room
from fuyou_cli.machine import probe
from fuyou_cli.machine.described import described
from fuyou_cli.machine.profile import assumed_hardware
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.prepare import Prepared, prepare, run_directories
from fuyou_cli.training.state.parts import STORE_FILE

from .conftest import Project

NewProject = Callable[..., Project]
PLENTY = 10**12


def _slow_computer(device: str) -> Any:
    """Measured, and so slow that outputs are worth their room on the ssd."""
    return replace(assumed_hardware(device=device), measured="2026-01-01", matmul_flops=1e6)


def _planned(project: Project, monkeypatch: pytest.MonkeyPatch, free: int, *changes: str) -> Prepared:
    """On a machine whose disks say that `free` bytes are left."""
    monkeypatch.setattr(probe, "free_space", lambda path: free)
    recipe = load_recipe(project.recipe, changes).recipe
    return prepare(recipe, probe=_slow_computer, say=lambda text: None, planning_only=True, store_room=store_room)


def _preallocated(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def test_a_search_stays_within_what_the_run_may_have(new_project: NewProject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit of the recipe, export on the same disk, and on a resumed run a disk that its own store has filled."""
    project = new_project(changes={"train.batch_size": 1024})
    roomy = _planned(project, monkeypatch, PLENTY).plan
    recompute = _planned(project, monkeypatch, PLENTY, "offload.activations=recompute").plan
    least, most = recompute.store_size, roomy.store_size
    assert most > least, "outputs on the ssd take room there"
    limited = _planned(project, monkeypatch, PLENTY, f"offload.max_memory.ssd={most - 1}")
    assert limited.plan.store_size <= most - 1 and not plan_problems(limited.plan, room_of(limited))

    export = roomy.predicted.export_bytes
    beside = _planned(project, monkeypatch, most + export - 1)
    assert beside.plan.store_size < most and not plan_problems(beside.plan, room_of(beside))
    alone = _planned(project, monkeypatch, most + export - 1, "export.at_end=false")
    assert alone.plan.store_size == most

    (folder,) = run_directories(load_recipe(project.recipe).recipe)
    _preallocated(folder / STORE_FILE, least)
    resumed = _planned(project, monkeypatch, export + 4096)
    assert resumed.plan.store_size < most and not plan_problems(resumed.plan, room_of(resumed))


def test_files_on_one_disk_share_it(new_project: NewProject, monkeypatch: pytest.MonkeyPatch) -> None:
    project = new_project(changes={"offload.dir": ["a", "b"], "export.at_end": False})
    monkeypatch.chdir(project.folder)
    monkeypatch.setattr(probe, "free_space", lambda path: 6 << 20)
    hardware = assumed_hardware(project.folder)

    def room(*changes: str) -> int:
        recipe = load_recipe(project.recipe, changes).recipe
        return store_room(recipe, hardware, run_directories(recipe), project.materials / "model", 1 << 20)

    assert room() == 6 << 20
    assert room("export.at_end=true") == 5 << 20
    assert room("offload.max_memory.ssd=3MiB") == 3 << 20
    _preallocated(run_directories(load_recipe(project.recipe).recipe)[0] / STORE_FILE, 2 << 20)
    assert room() == 8 << 20 and room("offload.max_memory.ssd=1TB") == 8 << 20
    monkeypatch.setattr(probe, "free_space", lambda path: 0)
    assert room("export.at_end=true") == 1 << 20


def test_what_is_shown_as_available_is_what_the_search_went_by(
    new_project: NewProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export is left out, and of two drives twice what the fuller one has."""
    project = new_project()
    prepared = _planned(project, monkeypatch, PLENTY)
    assert room_of(prepared).store == PLENTY - prepared.plan.predicted.export_bytes
    assert room_of(replace(prepared, hardware=described("2xgen4,64GiB")), described=True).store < 4 * 10**12
    monkeypatch.chdir(project.folder)
    both = _planned(new_project("both", {"offload.dir": ["a", "b"], "export.at_end": False}), monkeypatch, PLENTY)
    devices = {folder: SimpleNamespace(st_dev=number) for number, folder in enumerate(both.directories)}
    monkeypatch.setattr(room_module, "existing", lambda path: SimpleNamespace(stat=lambda: devices[path]))
    monkeypatch.setattr(probe, "free_space", lambda path: 4 * 10**12 if path == both.directories[0] else 5 * 10**11)
    assert room_of(both).store == 10**12


def test_a_described_machine_has_what_its_drives_have(new_project: NewProject) -> None:
    project = new_project()
    machine = described("2xgen4,64GiB")

    def room(*changes: str) -> int:
        recipe = load_recipe(project.recipe, changes).recipe
        return described_store_room(recipe, machine, (), project.materials, 10**11)

    assert room("export.at_end=false") == 4 * 10**12
    assert room() == 39 * 10**11
    assert room("offload.max_memory.ssd=50%") == 2 * 10**12
