"""Makes folders for work in progress. What a killed process leaves of them, the next one removes."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fuyou_cli.core.disk import FULL
from fuyou_cli.core.errors import UsageError

_PREFIX = ".fuyou-rows-"
_NAME = re.compile(re.escape(_PREFIX) + r"[a-z0-9_]{8}")  # as tempfile makes them
_OPENED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def scratch_in(folder: Path, *, what: str, hint: str) -> Iterator[Path]:
    """Makes a folder below `folder`, locked and removed at the end. First removes those that no living process has locked.
    Raises UsageError, with `what` and `hint`, if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        made, lock = _made(folder)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UsageError(f"{what}: {folder} cannot be written: {error.strerror}", hint=hint) from error
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(lock)


def _made(folder: Path) -> tuple[Path, int]:
    """Makes a locked folder. Another process may take one for left behind before it is locked: then makes another."""
    while True:
        made = Path(tempfile.mkdtemp(dir=folder, prefix=_PREFIX))
        with suppress(FileNotFoundError):
            lock = os.open(made, _OPENED)
            if _is_locked(lock) is not False and made.exists():
                return made, lock
            os.close(lock)


def _is_locked(descriptor: int) -> bool | None:
    """Locks a folder. Returns False if another process has it, None if its file system has no such locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _sweep(folder: Path) -> None:
    """Removes what a killed process of this user has left."""
    for left in folder.iterdir():
        if _NAME.fullmatch(left.name):
            with suppress(OSError):
                lock = os.open(left, _OPENED)
                try:
                    if os.fstat(lock).st_uid == os.geteuid() and _is_locked(lock):
                        shutil.rmtree(left, ignore_errors=True)
                finally:
                    os.close(lock)
