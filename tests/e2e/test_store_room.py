"""The store that a search may choose: what the disks have for it, whatever the run holds of them already."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fuyou_cli.advice.room import described_disks, disks_of, plan_problems, room_of
from fuyou_cli.core import disk
from fuyou_cli.machine.described import described
from fuyou_cli.machine.profile import assumed_hardware
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.training.plan_step import plan
from fuyou_cli.training.prepare import DiskShare, Planned, StoreDisks, inspect, resolve, run_directories
from fuyou_cli.training.state.store_folders import STORE_FILE

from .conftest import NewProject, Project
from .running import silent

PLENTY = 10**12


def _slow_computer(device: str) -> Any:
    """Makes a measured computer so slow that outputs are worth their room on the ssd."""
    return replace(assumed_hardware(device=device), measured="2026-01-01", matmul_flops=1e6)


def _planned(project: Project, monkeypatch: pytest.MonkeyPatch, free: int, *changes: str) -> Planned:
    """Plans on a machine whose disks say that `free` bytes are left."""
    monkeypatch.setattr(disk, "free_space", lambda path: free)
    recipe = load_recipe(project.recipe, changes).recipe
    inspected = inspect(resolve(recipe, to_run=False, say=silent), say=silent)
    return plan(inspected, _slow_computer(inspected.device), disks_of(inspected), say=silent)


def _preallocated(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def test_a_search_stays_within_what_the_run_may_have(new_project: NewProject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the recipe's limit, the export on the same disk, and on a resumed run a disk that its own store has filled."""
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
    monkeypatch.setattr(disk, "free_space", lambda path: 6 << 20)

    def room(*changes: str) -> int:
        resolved = resolve(load_recipe(project.recipe, changes).recipe, to_run=False, say=silent)
        return disks_of(resolved).budget(resolved.recipe, 1 << 20)

    assert room() == 6 << 20
    assert room("export.at_end=true") == 5 << 20
    assert room("offload.max_memory.ssd=3MiB") == 3 << 20
    _preallocated(run_directories(load_recipe(project.recipe).recipe)[0] / STORE_FILE, 2 << 20)
    assert room() == 8 << 20 and room("offload.max_memory.ssd=1TB") == 8 << 20
    monkeypatch.setattr(disk, "free_space", lambda path: 0)
    assert room("export.at_end=true") == 1 << 20


def test_what_is_shown_as_available_is_what_the_search_went_by(
    new_project: NewProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export is left out, and of two drives twice what the fuller one has."""
    project = new_project()
    prepared = _planned(project, monkeypatch, PLENTY)
    assert room_of(prepared).store == PLENTY - prepared.plan.predicted.export_bytes
    shares = tuple(DiskShare(free=free, files=1, has_export=False) for free in (4 * 10**12, 5 * 10**11))
    assert StoreDisks(shares=shares, total=10**13).budget(prepared.recipe, 10**11) == 10**12


def test_a_described_machine_has_what_its_drives_have(new_project: NewProject) -> None:
    project = new_project()
    machine = described("2xgen4,64GiB")

    def room(*changes: str) -> int:
        recipe = load_recipe(project.recipe, changes).recipe
        return described_disks(machine).budget(recipe, 10**11)

    assert room("export.at_end=false") == 4 * 10**12
    assert room() == 39 * 10**11
    assert room("offload.max_memory.ssd=50%") == 2 * 10**12
