"""Reads plain files alone: a pipe would be waited for, for ever, and a device may have no end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_CHUNK = 1 << 20
_KINDS = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))


def open_plain(path: Path) -> int:
    """Opens a plain file to read. Raises OSError where there is none, ValueError for an impossible name."""
    _refuse(path, path.stat())  # a device may do something when it is opened, and a socket has no words for it
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _refuse(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_plain(path: Path, *, limit: int) -> bytes:
    """Reads the first `limit` bytes. Raises OSError where there is no plain file, ValueError for an impossible name."""
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
    """Names what `os.stat` says is there: "a pipe"."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "no file")
