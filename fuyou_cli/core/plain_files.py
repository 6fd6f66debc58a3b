"""Reads plain files only. Reading a pipe might wait forever, and a device may have no end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_CHUNK = 1 << 20
_KINDS = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))


def open_plain(path: Path) -> int:
    """Opens a plain file for reading. Raises OSError if there is none, ValueError for an impossible name."""
    _refuse(path, path.stat())  # opening a device may have effects, and opening a socket gives an unclear error
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _refuse(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_plain(path: Path, *, limit: int) -> bytes:
    """Reads the first `limit` bytes. Raises OSError if there is no plain file, ValueError for an impossible name."""
    descriptor = open_plain(path)
    try:
        parts: list[bytes] = []
        while limit > 0 and (part := os.read(descriptor, min(limit, _CHUNK))):
            parts.append(part)
            limit -= len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def _refuse(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        what = kind_of(status.st_mode)
        raise OSError(errno.EINVAL, f"it is {what}, not a plain file", str(path))


def kind_of(mode: int) -> str:
    """Names the kind of file that a mode of `os.stat` means, for example "a pipe"."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "no file")
