"""Makes folders for what a measurement writes. Their names say whose they are, for whoever has to remove what is left."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fuyou_cli.core.errors import UsageError

_PREFIX = "fuyou-bench-{}-"  # with the number of the process


@contextmanager
def scratch_folder(directory: Path) -> Iterator[Path]:
    """Makes a folder of this process there, which is gone at the end. Raises UsageError where nothing can be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX.format(os.getpid()), dir=directory))
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error.strerror}", hint="name another directory") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def remove_left(directories: Iterable[Path], pid: int) -> None:
    """Removes what the process `pid`, which has ended, left there."""
    for directory in directories:
        for left in directory.glob(f"{_PREFIX.format(pid)}*"):
            shutil.rmtree(left, ignore_errors=True)
