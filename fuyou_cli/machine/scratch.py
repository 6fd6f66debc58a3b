"""Makes folders for what a measurement writes. Their names tell which process made them, so that leftovers can be removed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fuyou_cli.core.errors import UsageError

_PREFIX = "fuyou-bench-{}-"  # {}: the process id


@contextmanager
def scratch_folder(directory: Path) -> Iterator[Path]:
    """Makes a folder of this process in `directory` and removes it at the end. Raises UsageError if nothing can be written
    there."""
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
    """Removes what the ended process `pid` left there."""
    for directory in directories:
        for left in directory.glob(f"{_PREFIX.format(pid)}*"):
            shutil.rmtree(left, ignore_errors=True)
