"""Makes folders for what a measurement writes. Their names tell which process made them, so that leftovers can be removed."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fuyou_cli.core.disk import remedy
from fuyou_cli.core.errors import FuyouError, UsageError

_HIDDEN = 5.0  # seconds for a file system to let go of files that are closed
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
        _remove(folder)


def _remove(folder: Path) -> None:
    """Removes the folder. Where a file system hides what is removed while it is open (.fuse_hidden, .nfs), it may hear of the
    end of a file a little later than its closer, so this waits. Raises FuyouError if something stays."""
    until = time.monotonic() + _HIDDEN
    while True:
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EBUSY) or time.monotonic() >= until:
                raise FuyouError(f"cannot remove {folder}: {error.strerror}", hint=remedy(error) or "remove it") from error
            time.sleep(_HIDDEN / 100)
        else:
            return


def remove_left(directories: Iterable[Path], pid: int) -> None:
    """Removes what the ended process `pid` left there."""
    for directory in directories:
        for left in directory.glob(f"{_PREFIX.format(pid)}*"):
            shutil.rmtree(left, ignore_errors=True)
