"""Checks whether planned files fit their disks, with one sum per file system. Makes the names of written files durable."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .errors import FuyouError, OutOfSpaceError, UnreadableError, UsageError
from .units import gb

FULL = (errno.ENOSPC, errno.EDQUOT)
_AGAIN = "the drive keeps asking to try again: look at what `dmesg` says about it, then run the same command again"
_BAD = "the disk reported an error: look at `dmesg` and the drive's health"
_GONE = "its drive is gone: plug it in and mount it again"
_UNANSWERED = "the file system's server does not answer (FUSE, NFS): unmount the folder and mount it again"
REMEDIES = {  # errno -> what to do about a file that cannot be used
    errno.EIO: _BAD,
    errno.EREMOTEIO: _BAD,
    errno.EBADMSG: _BAD,
    errno.EUCLEAN: "the file system is damaged: look at `dmesg`, unmount it and check it (fsck)",
    errno.EROFS: "the file system is read-only: `dmesg` may say since when and why",
    errno.EACCES: "check the permissions of its folder",
    errno.EMFILE: "raise `ulimit -n`",
    errno.EFBIG: "the file is too large: check `ulimit -f` and the limit of the file system (4 GiB for FAT)",
    errno.EPERM: "look at what is there, and move it away",
    errno.EDQUOT: "your disk quota is used up (`quota` shows it): remove files of yours there, or have it raised",
    errno.ENOLCK: "the file system cannot lock files: start NFS's lock service (rpc.statd), or name a folder on a local drive",
    errno.ENOTCONN: _UNANSWERED,
    errno.ECONNABORTED: _UNANSWERED,
    errno.ESHUTDOWN: _UNANSWERED,
    errno.ETIMEDOUT: _UNANSWERED,
    errno.EHOSTDOWN: _UNANSWERED,
    errno.ESTALE: "the file system was mounted anew meanwhile: run the same command again",
    errno.ENODEV: _GONE,
    errno.ENXIO: _GONE,
    errno.EAGAIN: _AGAIN,
    errno.EINTR: _AGAIN,
}
_RUST = re.compile(r"\(os error (\d{1,4})\)")
_CAUSES = 20  # of an error that are looked at
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


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


def file_systems(files: Sequence[Wanted]) -> list[FileSystem]:
    """Sums up `files` by file system, in their order. Raises OSError."""
    together: dict[int, list[Wanted]] = {}
    for file in files:
        together.setdefault(existing(file.path).stat().st_dev, []).append(file)
    return [
        FileSystem(
            folders=tuple(dict.fromkeys(file.path.parent for file in files_there)),
            what=tuple(dict.fromkeys(file.what for file in files_there)),
            wanted=sum(file.size for file in files_there),
            held=sum(min(file.size, taken(file.path)) for file in files_there),
            free=free_space(files_there[0].path.parent),
            device=device,
        )
        for device, files_there in together.items()
    ]


def free_space(path: Path) -> int:
    """Returns the bytes that an ordinary user can still write where `path` is or would be. Raises OSError."""
    return shutil.disk_usage(existing(path)).free


def striped_space(*folders: Path) -> int:
    """Returns the bytes that files striped evenly over `folders` can have in all. Raises OSError."""
    systems = [existing(folder).stat().st_dev for folder in folders]
    shares = [free_space(folder) // systems.count(system) for folder, system in zip(folders, systems, strict=True)]
    return min(shares) * len(folders)


def store_files(paths: Sequence[Path], size: int) -> list[Wanted]:
    """Lists the files of a store of `size` bytes, striped over them."""
    return [Wanted(what="the store", path=path, size=-(-size // len(paths))) for path in paths]


def existing(path: Path) -> Path:
    """Returns `path`, or the nearest folder above it that exists."""
    absolute = path.expanduser().absolute()
    return next((place for place in (absolute, *absolute.parents) if place.exists()), Path("/"))


def status_of(path: str | Path, *, follow: bool = True) -> os.stat_result | None:
    """Returns the status of what is at a path, or None where nothing is. Raises UnreadableError where nobody can tell now."""
    try:
        return Path(path).stat(follow_symlinks=follow)
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return None
        raise unreadable(path, error) from None
    except ValueError:  # a null character
        return None


def file_size(path: str | Path) -> int | None:
    """Returns the bytes of a plain file, or None where none is. Raises UnreadableError where nobody can tell now."""
    status = status_of(path)
    return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None


def unreadable(path: str | Path, error: OSError, *, verb: str = "read") -> UnreadableError:
    """Returns the error for a part of a saved state that cannot be read, or locked, now."""
    cause = f"{remedy(error)}; " if remedy(error) else ""
    return UnreadableError(
        f"{path}: cannot be {verb}: {error.strerror}",
        hint=f"{cause}nothing is lost or changed: run the same command again once it can be {verb}",
    )


def unusable(message: str, error: BaseException, *, hint: str | None = None) -> UsageError:
    """Returns the error for a file that cannot be read: UnreadableError with the remedy of its drive or permission where one of
    them is the cause, also of a library's error, otherwise UsageError with `hint`."""
    known = REMEDIES.get(_errno_below(error))
    return UsageError(message, hint=hint) if known is None else UnreadableError(message, hint=known)


def _errno_below(error: BaseException) -> int:
    """Finds the first errno with a remedy in an error or its causes; 0 if there is none. Libraries in Rust write it into their
    text."""
    below: BaseException | None = error
    for _ in range(_CAUSES):
        if below is None:
            break
        match = _RUST.search(str(below))
        number = getattr(below, "errno", None) or (int(match[1]) if match else 0)
        if number in REMEDIES:
            return int(number)
        below = below.__cause__ or below.__context__
    return 0


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
        return OutOfSpaceError(f"cannot write {path}: {error.strerror}", hint=remedy(error) or "free space on that disk")
    return FuyouError(f"cannot write {path}: {error.strerror}", hint=remedy(error))


def remedy(error: Exception) -> str | None:
    """Says what to do about a file that cannot be used, if its disk is the cause."""
    return REMEDIES.get(getattr(error, "errno", None) or 0)


def taken(path: Path) -> int:
    """Returns the disk bytes of a file. Holes count as nothing, and so do folders, because a new one is written beside the old
    one."""
    return path.stat().st_blocks * 512 if path.is_file() else 0
