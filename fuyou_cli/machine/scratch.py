"""Folders for what a measurement writes. Their names say whose they are, so that whoever started a measurement in a process of
its own can remove what that one could not."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from fuyou_cli.core.errors import UsageError


def _prefix(pid: int) -> str:
    return f"fuyou-bench-{pid}-"


def made_in(directory: Path) -> Path:
    """A new folder of this process there. Raises UsageError where nothing can be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=_prefix(os.getpid()), dir=directory))
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error.strerror}", hint="name another directory") from error


def remove(folder: Path) -> None:
    """One that `made_in` made, by this process."""
    shutil.rmtree(folder)


def remove_left(directories: Iterable[Path], pid: int) -> None:
    """What the process `pid`, which has ended, left there."""
    for directory in directories:
        for left in directory.glob(f"{_prefix(pid)}*"):
            shutil.rmtree(left, ignore_errors=True)
