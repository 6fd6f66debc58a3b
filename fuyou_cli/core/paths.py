"""Resolves paths as people write them, reads plain files only, and makes and opens files and folders that only this user can
access.

Reading a pipe might wait forever, and a device may have no end. Other users may have put anything where a run's folder will be:
a link to one of our files, a second name for one, a pipe that nobody reads. Nothing is opened through a link, waited for, or
changed before it is known to be ours.

Folders for work in progress are locked: what a killed process leaves of them, the next one removes.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from .disk import FULL, remedy, unreadable, unusable
from .errors import FuyouError, UsageError

# ---- plain files, and our own ----------------------------------------------------------------------------------------


_CHUNK = 1 << 20
_KINDS = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))
_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR)  # a link, a pipe or socket, a folder
_NO_MODES = (errno.EPERM, errno.EOPNOTSUPP)  # the file is ours, but its file system has no permissions
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_AS_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SCRATCH = ".fuyou-rows-"
_SCRATCH_NAME = re.compile(re.escape(_SCRATCH) + r"[a-z0-9_]{8}")  # as tempfile makes them


def open_plain(path: Path) -> int:
    """Opens a plain file for reading. Raises OSError if there is none, ValueError for an impossible name."""
    _check_plain(path, path.stat())  # opening a device may have effects, and opening a socket gives an unclear error
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check_plain(path, os.fstat(descriptor))
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


def _check_plain(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        what = kind_of(status.st_mode)
        raise OSError(errno.EINVAL, f"it is {what}, not a plain file", str(path))


def kind_of(mode: int) -> str:
    """Names the kind of file that a mode of `os.stat` means, for example "a pipe"."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "no file")


def own_folder(folder: Path) -> None:
    """Makes the folder and closes it to other users. Raises UsageError if it is a link or belongs to another user."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.is_symlink():
        raise UsageError(f"{folder} is a symbolic link", hint="replace the link by the folder it leads to")
    descriptor = os.open(folder, _AS_FOLDER)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise UsageError(f"{folder} belongs to another user", hint="name another folder in offload.dir, or move this one")
        if status.st_mode & _OTHERS:
            _set_mode(descriptor, stat.S_IMODE(status.st_mode) & ~_OTHERS)
    finally:
        os.close(descriptor)


def is_own(path: Path) -> bool:
    """Whether the file exists and is as `open_own` leaves it."""
    try:
        status = path.lstat()
    except OSError:
        return False
    is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    return is_plain and status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o600


def open_own(path: Path, *, anew: bool) -> int:
    """Opens or creates the file, closed to other users. `anew`: empties it. Raises OSError if something else has its name."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise _not_ours(path, "is not a plain file") from None
        raise
    try:
        _make_ours(path, descriptor, anew=anew)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def pieces(content: bytes | Path) -> Iterator[bytes]:
    """Yields a content piece by piece, that of a file as it is read: a tokenizer.json may have tens of megabytes. Raises
    UsageError with the file's name where it cannot be read."""
    try:
        with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as stream:
            yield from iter(partial(stream.read, _CHUNK), b"")
    except OSError as error:
        raise unusable(f"{content!s}: cannot be read: {error.strerror}", error) from error


def write_own(path: Path, content: Iterable[bytes]) -> None:
    """Writes a new file, piece by piece. Its content is on stable storage when this returns."""
    with os.fdopen(open_own(path, anew=True), "wb") as file:
        file.writelines(content)
        file.flush()
        os.fsync(file.fileno())


def keep_file(path: Path, content: bytes, *, most: int | None = None) -> None:
    """Replaces a file of what is kept in one step, and makes its folder. `most`: files of the folder that stay, those that were
    used last. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    whole = path.with_name(f"{path.name}.{os.getpid()}")  # renamed when complete: nobody reads half of it
    try:
        write_own(whole, [content])
        whole.replace(path)
    finally:
        whole.unlink(missing_ok=True)
    with suppress(OSError):  # another process may be at the same
        used = sorted((file.lstat().st_mtime_ns, file) for file in path.parent.iterdir()) if most is not None else []
        for _, file in used[: -(most or 0)]:
            with suppress(OSError):  # what is no file is not ours
                file.unlink()


def _make_ours(path: Path, descriptor: int, *, anew: bool) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise _not_ours(path, "is not a plain file")
    if status.st_uid != os.geteuid():
        raise _not_ours(path, "belongs to another user")
    if status.st_nlink > 1:
        raise _not_ours(path, "has a second name (hard link)")
    if stat.S_IMODE(status.st_mode) != 0o600:
        _set_mode(descriptor, 0o600)
    if anew and status.st_size:
        os.ftruncate(descriptor, 0)


def _set_mode(descriptor: int, mode: int) -> None:
    try:
        os.fchmod(descriptor, mode)
    except OSError as error:
        if error.errno not in _NO_MODES:
            raise


def _not_ours(path: Path, why: str) -> OSError:
    return OSError(errno.EPERM, f"{path.name} {why}")


# ---- paths of a recipe -----------------------------------------------------------------------------------------------


def expanded(path: str | Path, *, key: str) -> Path:
    """Replaces ~ and ~user in a path. Raises UsageError if there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # pathlib raises only this for an unknown user
        raise UsageError(
            f"{key}: {path}: {error}", hint="write the full path, or ./~... for a name that begins with ~"
        ) from None


def is_same_folder(first: str | Path, second: str | Path) -> bool:
    """Whether both are the same folder, through links or mounted in two places."""
    try:
        return os.path.realpath(first) == os.path.realpath(second) or Path(first).samefile(second)
    except (OSError, ValueError):
        return False


def is_file(path: str | Path) -> bool:
    """Whether a file exists. Returns False for an impossible name, for which pathlib raises."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def folder(path: str | Path, *, key: str) -> Path:
    """Expands the path of a folder that exists or will be made. Raises UsageError if a file is in its place."""
    whole = expanded(path, key=key)
    try:
        for place in (whole, *whole.parents):
            if place.is_dir():
                break
            if os.path.lexists(place):
                what = "a file" if place.exists() else "a link to nothing"
                raise UsageError(f"{key}: {path}: {place} is {what}, not a folder", hint="name a folder, or a new one")
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.ENAMETOOLONG):  # its drive, which may hold a saved run
            raise unreadable(f"{key}: {path}", error) from None
        raise UsageError(f"{key}: {path}: {error.strerror}", hint=remedy(error) or "name a folder that can be used") from None
    return whole


def kept_folder() -> Path:
    """Returns the folder where fuyou keeps what it can find out again: outside of any run, for one user."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fuyou"


def machine_id() -> str:
    """Returns what stays the same for this installation, whatever its host name, and differs in machines that share a home
    folder. Empty in most containers."""
    try:
        return Path("/etc/machine-id").read_text(errors="replace").strip()
    except OSError:
        return ""


# ---- folders of a measurement ----------------------------------------------------------------------------------------


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


# ---- folders for work in progress ------------------------------------------------------------------------------------


@contextmanager
def scratch_in(folder: Path, *, what: str, hint: str) -> Iterator[Path]:
    """Makes a folder below `folder`, locked and removed at the end. First removes those that no living process has locked.
    Raises UsageError, with `what` and `hint`, if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.iterdir():
            if _SCRATCH_NAME.fullmatch(left.name):
                _remove_if_left(left)
        scratch, lock = _locked_folder(folder)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UsageError(f"{what}: {folder} cannot be written: {error.strerror}", hint=hint) from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def _remove_if_left(folder: Path) -> None:
    """Removes what a killed process of this user has left."""
    with suppress(OSError):
        lock = os.open(folder, _AS_FOLDER)
        try:
            if os.fstat(lock).st_uid == os.geteuid() and _is_locked(lock):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _locked_folder(folder: Path) -> tuple[Path, int]:
    while True:
        scratch = Path(tempfile.mkdtemp(dir=folder, prefix=_SCRATCH))
        with suppress(FileNotFoundError):  # another process may take it for left behind before it is locked
            lock = os.open(scratch, _AS_FOLDER)
            if _is_locked(lock) is not False and scratch.exists():
                return scratch, lock
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
