"""Checks whether planned files fit their disks, with one sum per file system. Makes the names of written files durable."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .errors import FuyouError, OutOfSpaceError
from .units import gb

FULL = (errno.ENOSPC, errno.EDQUOT)
_AGAIN = "the drive keeps asking to try again: look at what `dmesg` says about it, then run the same command again"
REMEDIES = {  # errno -> what to do about a file that cannot be used
    errno.EIO: "the disk reported an error: look at `dmesg` and the drive's health",
    errno.EROFS: "the file system is read-only: `dmesg` may say since when and why",
    errno.EACCES: "check the permissions of its folder",
    errno.EFBIG: "the file is too large: check `ulimit -f` and the limit of the file system (4 GiB for FAT)",
    errno.EPERM: "look at what is there, and move it away",
    errno.EAGAIN: _AGAIN,
    errno.EINTR: _AGAIN,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Names a file, or a new folder of files, of `size` bytes that a run will write."""

    what: str  # name for messages: "the store"
    path: Path
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSystem:
    """Sums up what a run will write to one file system."""

    folders: tuple[Path, ...]
    what: tuple[str, ...]
    wanted: int
    held: int  # part of `wanted` that the run's own files already take
    free: int
    device: int  # st_dev

    @property
    def missing(self) -> int:
        return max(0, self.wanted - self.held - self.free)

    @property
    def problem(self) -> str:
        """Says in one sentence what is missing. Empty if everything fits."""
        if not self.missing:
            return ""
        verb = "needs" if len(self.what) == 1 else "need"
        more = " more" if self.held else ""
        return (
            f"{' and '.join(self.what)} {verb} {gb(self.wanted - self.held)}{more} of disk in "
            f"{', '.join(map(str, self.folders))}, but {gb(self.free)} are free"
        )


def file_systems(files: Sequence[Wanted], free_space: Callable[[Path], int]) -> list[FileSystem]:
    """Sums up `files` by file system, in their order. `free_space` returns the bytes that can be written at a path."""
    together: dict[int, list[Wanted]] = {}
    for file in files:
        together.setdefault(existing(file.path).stat().st_dev, []).append(file)
    return [
        FileSystem(
            folders=tuple(dict.fromkeys(file.path.parent for file in here)),
            what=tuple(dict.fromkeys(file.what for file in here)),
            wanted=sum(file.size for file in here),
            held=sum(min(file.size, taken(file.path)) for file in here),
            free=free_space(here[0].path.parent),
            device=device,
        )
        for device, here in together.items()
    ]


def store_files(paths: Sequence[Path], size: int) -> list[Wanted]:
    """Lists the files of a store of `size` bytes, striped over them."""
    return [Wanted(what="the store", path=path, size=-(-size // len(paths))) for path in paths]


def existing(path: Path) -> Path:
    """Returns `path`, or the nearest folder above it that exists."""
    absolute = path.expanduser().absolute()
    return next((place for place in (absolute, *absolute.parents) if place.exists()), Path("/"))


def sync_directory(directory: Path) -> None:
    """Waits until the names in `directory` are on stable storage."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync folders and do not need to
            raise
    finally:
        os.close(descriptor)


def sync_names_above(directory: Path) -> None:
    """Waits until the folders above `directory` are on stable storage, because a killed run may have made them."""
    device = directory.stat().st_dev
    for above in directory.absolute().parents:
        if above.stat().st_dev != device:
            return
        with suppress(PermissionError):  # a folder of another user was there before
            sync_directory(above)


def failed_writing(path: Path, error: OSError) -> FuyouError:
    """Returns the error for a file that cannot be written."""
    if error.errno in FULL:
        return OutOfSpaceError(f"cannot write {path}: {error.strerror}", hint="free space on that disk")
    return FuyouError(f"cannot write {path}: {error.strerror}", hint=remedy(error))


def remedy(error: Exception) -> str | None:
    """Says what to do about a file that cannot be used, if its disk is the cause."""
    return REMEDIES.get(getattr(error, "errno", None) or 0)


def taken(path: Path) -> int:
    """Returns the disk bytes of a file. Holes count as nothing, and so do folders, because a new one is written beside the old
    one."""
    return path.stat().st_blocks * 512 if path.is_file() else 0
