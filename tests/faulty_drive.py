"""Mounts a file system with faults over a folder (`faulty_drive.c`), for tests of drives. Skips where that cannot be."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")
WITHOUT = ("FALLOCATE * EOPNOTSUPP", "LINK * EPERM")  # as exfat has it: no room reserved, no second names


@cache
def _program() -> Path:
    """Compiles the server, once."""
    if shutil.which("gcc") is None or not os.access("/dev/fuse", os.R_OK | os.W_OK) or os.geteuid() != 0:
        pytest.skip("needs gcc, /dev/fuse and the right to mount")
    program = Path(tempfile.mkdtemp(prefix="fuyou-faulty-")) / "faulty_drive"
    done = subprocess.run(
        ["gcc", "-std=gnu11", "-O1", "-pthread", "-o", program, SOURCE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return program


@dataclass(kw_only=True, slots=True)
class FaultyDrive:
    """Holds a mounted drive: its files at `path`, and the same without faults in `behind`."""

    path: Path
    behind: Path
    rules: Path
    server: subprocess.Popen[str]

    def fault(self, *rules: str) -> None:
        """Replaces the faults. A rule is `OPERATION NAME ERRNO [FIRST END]`, the errno by its name, or `-MILLISECONDS`."""
        lines = []
        for rule in rules:
            operation, name, what, *span = rule.split()
            number = what if what.startswith("-") else str(getattr(errno, what))
            lines.append(" ".join((operation, name, number, *span)))
        new = self.rules.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.replace(self.rules)

    def left(self) -> list[Path]:
        """Lists all behind it, once it has heard of the end of what was removed while it was open: that comes after `close`."""
        until = time.monotonic() + 10
        while any(self.behind.rglob(".fuse_hidden*")) and time.monotonic() < until:
            time.sleep(0.02)
        return sorted(self.behind.rglob("*"))

    def lose(self) -> None:
        """Ends the server: the mount stays, and each use of it is answered with ENOTCONN."""
        self.server.kill()
        self.server.wait()


@contextmanager
def faulty_drive(folder: Path, *rules: str) -> Iterator[FaultyDrive]:
    """Mounts one in `folder`, which is made. Skips the test where that is not possible."""
    folder.mkdir()
    path, behind = folder / "drive", folder / "behind"
    path.mkdir()
    behind.mkdir()
    program = _program()
    (folder / "rules").touch()
    server = subprocess.Popen(
        [program, behind, path, folder / "rules"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None and server.stdout is not None
    drive = FaultyDrive(path=path, behind=behind, rules=folder / "rules", server=server)
    try:
        if server.stdout.readline() != "ready\n":
            pytest.skip("a FUSE file system cannot be mounted here")
        drive.fault(*rules)
        yield drive
    finally:
        subprocess.run(["umount", "-l", path], capture_output=True, check=False)
        server.stdin.close()
        server.stdout.close()
        server.kill()
        server.wait()
