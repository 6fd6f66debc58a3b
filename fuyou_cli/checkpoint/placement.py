"""Moves a finished model directory to its place in one step. Never replaces a directory that fuyou did not write."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from fuyou_cli.core.disk import sync_directory
from fuyou_cli.core.errors import UsageError

from .companions import TEMPLATE_FOLDER, is_companion
from .files import ADAPTER_NAME, INDEX_NAME, SINGLE_NAME, name_list
from .header import parse_file

_WRITER = {"written_by": "fuyou"}
_COMPANIONS = "companions"

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def mark(companions: Iterable[str]) -> dict[str, str]:
    """Returns the metadata for every safetensors file that we write: that it is ours, and which files are beside it."""
    return {**_WRITER, _COMPANIONS: json.dumps(sorted(companions))}


class PartialDirectory:
    """Owns a directory under construction, named .<target>.partial beside its target. It is removed if nothing is published.

    It is locked while in use. So the leftover of a killed run can be told from what another run is writing.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.parent / f".{target.name}.partial"
        self._descriptor = -1
        self._published = False

    def __enter__(self) -> PartialDirectory:
        refuse_foreign(self.target)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_files(self.path)
        except BaseException as error:
            os.close(self._descriptor)
            if isinstance(error, BlockingIOError):
                raise UsageError(
                    f"{self.target}: another process is writing a model there",
                    hint="wait for it to finish, or choose another output directory",
                ) from error
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if not self._published:
                _remove_directory(self.path)
        finally:
            os.close(self._descriptor)

    def publish(self) -> None:
        """Gives the directory its final name. Removes what was there before, if we wrote it."""
        refuse_foreign(self.target)  # checked again: writing may have taken an hour
        old = None
        if self.target.is_dir() and any(self.target.iterdir()):
            old = _exchange(self.path, self.target)
        else:
            self.path.rename(self.target)
        self._published = True
        sync_directory(self.target.parent)  # otherwise a power cut could leave the old name on what is removed next
        if old:
            _remove_directory(old)
            sync_directory(self.target.parent)


def refuse_foreign(directory: Path) -> None:
    """Raises UsageError unless the directory is absent, empty, or holds only a model or an adapter that we wrote."""
    try:
        names = _names(directory)
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise UsageError(f"{directory}: is a file", hint="choose another output directory") from error
    if not names:
        return
    ours: set[str] = set()
    for name in names:
        if _is_weights(name):
            ours |= _claimed(directory / name)
    foreign = [name for name in names if name not in ours or not stat.S_ISREG((directory / name).lstat().st_mode)]
    if foreign:
        raise UsageError(
            f"{directory}: holds files that fuyou did not write: {name_list(foreign)}",
            hint="choose a new or empty output directory; nothing was changed",
        )


def _names(directory: Path) -> list[str]:
    """Lists what is in a directory; in place of its folder of templates, what that holds, as `FOLDER/NAME`."""
    names = {file.name for file in directory.iterdir()}
    if _has_templates(directory):
        names -= {TEMPLATE_FOLDER}
        names |= {f"{TEMPLATE_FOLDER}/{file.name}" for file in (directory / TEMPLATE_FOLDER).iterdir()}
    return sorted(names)


def _has_templates(directory: Path) -> bool:
    """Tells whether there is a folder of templates, and not a link to one."""
    folder = directory / TEMPLATE_FOLDER
    return folder.is_dir() and not folder.is_symlink()


def _is_weights(name: str) -> bool:
    return name in (SINGLE_NAME, ADAPTER_NAME) or (name.startswith("model-") and name.endswith(".safetensors"))


def _claimed(file: Path) -> set[str]:
    """Reads which names in its directory a weights file says we wrote; none if it is damaged or not ours."""
    try:
        metadata = parse_file(file).metadata
        companions = json.loads(metadata.get(_COMPANIONS, "[]"))
    except (UsageError, ValueError, RecursionError):
        return set()
    if not _WRITER.items() <= metadata.items() or not isinstance(companions, list):
        return set()
    return {file.name, *(name for name in companions if isinstance(name, str))}


def _remove_files(directory: Path) -> None:
    """Removes the files that we write, with the folder of templates, and no others. An unfinished shard has no valid header
    yet, so names decide."""
    names = _names(directory)
    foreign = [name for name in names if not (_is_weights(name) or name == INDEX_NAME or is_companion(name))]
    if foreign:
        raise UsageError(
            f"{directory}: holds files that fuyou did not write: {name_list(foreign)}",
            hint="move that directory away",
        )
    for name in names:
        (directory / name).unlink()
    if _has_templates(directory):
        (directory / TEMPLATE_FOLDER).rmdir()


def _remove_directory(directory: Path) -> None:
    _remove_files(directory)
    directory.rmdir()


def _exchange(new: Path, target: Path) -> Path:
    """Swaps two directories and returns the old one's new path."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        result = libc.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE)
        if result == 0:
            return new
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise OSError(code, os.strerror(code), str(target))
    # A file system without exchange: for an instant only the old model exists, under its second name.
    old = target.parent / f".{target.name}.replaced"
    target.rename(old)
    try:
        new.rename(target)
    except OSError:
        old.rename(target)
        raise
    return old
