"""Reads what is mounted where, and tells file systems apart: by what stays when they are mounted again.

A device number does not: the next file system that is mounted may get it.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path

from .disk import existing

ROOT = Path("/")
IN_MEMORY = ("tmpfs", "ramfs")
_GET_UUID = 0x80111500  # FS_IOC_GETFSUUID, from Linux 6.9 on
_UUID_ROOM = 17  # bytes of struct fsuuid2: the length, then the UUID


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """Holds a line of /proc/self/mountinfo."""

    point: Path
    kind: str  # ext4, tmpfs, overlay, 9p ...
    source: str
    root: str  # the part of the file system that is mounted
    options: str


def mounts(root: Path = ROOT) -> list[Mount]:
    """Lists what is mounted, in the order it was; empty without /proc."""
    try:
        text = os.fsdecode((root / "proc/self/mountinfo").read_bytes())
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if separator and len(left) >= 6 and len(right) >= 2:
            options = right[2] if len(right) > 2 else ""
            found.append(
                Mount(point=Path(_plain(left[4])), kind=right[0], source=_plain(right[1]), root=left[3], options=options)
            )
    return found


def _plain(name: str) -> str:
    """Undoes the kernel's escapes: spaces, tabs, line ends and backslashes are octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), name)


def mount_of(path: Path, root: Path = ROOT) -> Mount | None:
    """Finds the mount that `path` is on: the deepest one that contains it."""
    resolved = existing(path).resolve()
    on = [mount for mount in mounts(root) if resolved.is_relative_to(mount.point)]
    return max(reversed(on), key=lambda mount: len(mount.point.parts), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSystemName:
    """Names a file system: `identity` stays the same when it is mounted again, also elsewhere; `told` is for people."""

    identity: str
    told: str


def file_system_of(path: Path) -> FileSystemName:
    """Names the file system that `path` is or would be on. Raises OSError."""
    place = existing(path)
    mount = mount_of(place)
    if mount is None:
        return FileSystemName(identity=f"device {place.stat().st_dev}", told="an unknown file system")
    told = f"{mount.kind} of {mount.source}, mounted at {mount.point}"
    if mount.kind in IN_MEMORY:
        return FileSystemName(identity=f"{mount.kind} at {mount.point}", told=told)
    if not mount.source.startswith("/dev/"):  # on a network, or of a program; the UUID of an overlay changes
        return FileSystemName(identity=f"{mount.kind} of {mount.source} at {mount.point}", told=told)
    return FileSystemName(identity=f"{mount.kind} {_uuid(place) or mount.source}", told=told)


def _uuid(place: Path) -> str:
    """Returns the UUID of the file system on a drive; empty if the kernel does not tell."""
    descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        answer = bytearray(_UUID_ROOM)
        fcntl.ioctl(descriptor, _GET_UUID, answer)
        return str(uuid.UUID(bytes=bytes(answer[1:]))) if any(answer[1:]) else ""
    except OSError:  # an older kernel, or a file system without one
        device = os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)
    return next((link.name for link in _named() if _number(link) == device), "")


def _named() -> list[Path]:
    try:
        return sorted(Path("/dev/disk/by-uuid").iterdir())
    except OSError:
        return []


def _number(link: Path) -> int | None:
    try:
        status = link.stat()
    except OSError:
        return None
    return status.st_rdev if stat.S_ISBLK(status.st_mode) else None
