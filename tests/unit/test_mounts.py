"""Tests that file systems are told apart by what stays when they are mounted again."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from faulty_drive import faulty_drive

from fuyou_cli.core.probe import file_system_of, mount_of, mounts


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
