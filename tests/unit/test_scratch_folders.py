"""Tests what is left of folders for work in progress."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fuyou_cli.core.paths import scratch_in

SAYING = {"what": "here", "hint": "elsewhere"}
KILLED = """
import os, pathlib, signal, sys
from fuyou_cli.core.paths import scratch_in
with scratch_in(pathlib.Path(sys.argv[1]), what="", hint="") as made:
    (made / "tokens.bin").write_text("half")
    print(made.name, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True)
    left = tmp_path / done.stdout.strip()
    assert done.returncode == -signal.SIGKILL and left.parent == tmp_path and (left / "tokens.bin").exists()
    others = [tmp_path / ".fuyou-rows-mine", tmp_path / "fuyou-rows-abcdefgh", tmp_path / ".fuyou-rows-ABCDEFGH"]
    for other in others:
        other.mkdir()
    (link := tmp_path / ".fuyou-rows-abcdefgh").symlink_to(others[0], target_is_directory=True)
    with scratch_in(tmp_path, **SAYING) as one, scratch_in(tmp_path, **SAYING) as two:
        assert one.is_dir() and two.is_dir() and not left.exists()
    assert {*tmp_path.iterdir()} == {*others, link}


def test_one_that_another_process_takes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, taken = os.open, list[Path]()

    def open_late(path: Path, flags: int) -> int:
        if not taken:
            taken.append(path)
            path.rmdir()
        return opened(path, flags)

    monkeypatch.setattr(os, "open", open_late)
    with scratch_in(tmp_path, **SAYING) as made:
        assert made.is_dir() and [made] != taken
