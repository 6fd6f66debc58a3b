"""Room on disks, file systems that are mounted, and paths as people write them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from faulty_drive import faulty_drive

from fuyou_cli.core import disk as disks
from fuyou_cli.core.disk import Wanted, file_systems, store_files
from fuyou_cli.core.errors import OutOfSpaceError, UsageError
from fuyou_cli.core.paths import folder
from fuyou_cli.core.probe import file_system_of, mount_of, mounts
from fuyou_cli.training.state.store_folders import check_space

# ---- disk ------------------------------------------------------------------------------------------------------------
# Tests one sum per file system: shares of striped folders together, what the run holds already taken off. Real files.


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


# ---- mounts ----------------------------------------------------------------------------------------------------------
# Tests that file systems are told apart by what stays when they are mounted again.


def _run(*words: str | Path) -> None:
    if shutil.which(str(words[0])) is None or subprocess.run(words, capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")


def test_a_file_system_keeps_its_name_wherever_it_is_mounted(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("a", "b with a space")]
    for number in (1, 2):
        _run("truncate", "-s", "16M", tmp_path / f"image{number}")
        _run("mkfs.ext4", "-q", "-F", tmp_path / f"image{number}")
    found = []
    for place, number in ((places[0], 1), (places[0], 2), (places[1], 1)):
        place.mkdir(exist_ok=True)
        _run("mount", "-o", "loop", tmp_path / f"image{number}", place)
        try:
            found.append(file_system_of(place / "new" / "folder"))
            assert str(place) in found[-1].told and mount_of(place / "new") in mounts()
        finally:
            subprocess.run(["umount", place], check=True)
    assert found[0].identity == found[2].identity != found[1].identity
    assert file_system_of(tmp_path).identity not in {name.identity for name in found}


def test_a_device_number_that_another_file_system_gets_does_not_tell(tmp_path: Path) -> None:
    """Mounts one in memory, and after it a FUSE file system."""
    memory = tmp_path / "memory"
    memory.mkdir()
    names = []
    for _ in range(2):
        _run("mount", "-t", "tmpfs", "none", memory)
        names.append(file_system_of(memory).identity)
        number = memory.stat().st_dev
        subprocess.run(["umount", memory], check=True)
    assert names[0] == names[1]  # its rates are those of memory
    with faulty_drive(tmp_path / "drive") as drive:
        assert file_system_of(drive.path).identity != names[0]
        assert drive.path.stat().st_dev == number


# ---- paths -----------------------------------------------------------------------------------------------------------
# Tests paths of a recipe that cannot be what they should be: one error, with the key.


def test_a_folder_may_be_there_or_not_yet(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for good in (tmp_path, tmp_path / "new" / "er", tmp_path / "link" / "new", Path("relative")):
        assert folder(good, key="offload.dir") == good
    assert folder("~/x", key="offload.dir") == Path.home() / "x"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("file", "file is a file, not a folder"),
        ("file/below/it", "file is a file, not a folder"),
        ("link", "link is a file, not a folder"),
        ("nowhere", "nowhere is a link to nothing"),
        ("x" * 300, "File name too long"),
    ],
)
def test_what_stands_in_the_way_is_named(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    with pytest.raises(UsageError, match=words) as caught:
        folder(tmp_path / name, key="offload.dir")
    assert caught.value.message.startswith("offload.dir: ")


def test_a_home_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"offload.dir: ~nosuchuser/x"):
        folder("~nosuchuser/x", key="offload.dir")
