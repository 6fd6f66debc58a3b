"""Tests one sum per file system: shares of striped folders together, what the run holds already taken off. Real files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fuyou_cli.core import disk as disks
from fuyou_cli.core.disk import Wanted, file_systems, store_files
from fuyou_cli.core.errors import OutOfSpaceError
from fuyou_cli.training.state.store_folders import check_space

MB = 10**6


def _preallocated(path: Path, size: int) -> Path:
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    return path


def _paths(folder: Path) -> list[Path]:
    return [folder / name / "run" / "store.bin" for name in ("a", "b")]


def test_folders_on_one_file_system_share_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = store_files(_paths(tmp_path), 10 * MB)
    assert [file.size for file in files] == [5 * MB, 5 * MB]
    monkeypatch.setattr(disks, "free_space", lambda path: 6 * MB)  # enough for either, not for both
    (disk,) = file_systems(files)
    assert (disk.wanted, disk.missing) == (10 * MB, 4 * MB)
    assert "the store needs 10 MB of disk" in disk.problem and "6 MB are free" in disk.problem
    with pytest.raises(OutOfSpaceError, match="the store needs 10 MB of disk"):
        check_space(_paths(tmp_path), 10 * MB)
    monkeypatch.setattr(disks, "free_space", lambda path: 10 * MB)
    check_space(_paths(tmp_path), 10 * MB)


def test_file_systems_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system only")
    files = [Wanted(what="the store", path=folder / "fuyou-none" / "f", size=8 * MB) for folder in (tmp_path, other)]
    monkeypatch.setattr(disks, "free_space", lambda path: 5 * MB if path.is_relative_to(other) else 9 * MB)
    systems = file_systems(files)
    assert [bool(disk.problem) for disk in systems] == [False, True]
    assert str(other) in systems[1].problem


def test_what_is_there_already_is_not_wanted_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = _paths(tmp_path)
    _preallocated(paths[0], 5 * MB)
    files = [*store_files(paths, 10 * MB), Wanted(what="the exported model", path=tmp_path / "model", size=MB)]
    monkeypatch.setattr(disks, "free_space", lambda path: 6 * MB)
    (disk,) = file_systems(files)
    assert disk.held == 5 * MB and disk.problem == ""
    monkeypatch.setattr(disks, "free_space", lambda path: 5 * MB)
    (short,) = file_systems(files)
    assert short.missing == MB
    assert short.problem.startswith("the store and the exported model need 6 MB more of disk in ")


def test_holes_and_files_that_are_too_long_hold_no_more_than_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = _paths(tmp_path)
    _preallocated(paths[0], 50 * MB)  # of an earlier, larger store: it is not room for the other folder's share
    paths[1].parent.mkdir(parents=True)
    with paths[1].open("wb") as sparse:
        sparse.truncate(5 * MB)
    monkeypatch.setattr(disks, "free_space", lambda path: 0)
    (disk,) = file_systems(store_files(paths, 10 * MB))
    assert (disk.held, disk.missing) == (5 * MB, 5 * MB)
