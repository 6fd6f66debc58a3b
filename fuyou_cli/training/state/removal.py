"""Finds the files of stores that a manifest names, and removes them and nothing else.

A store is `<folder>/<run>/manifest.json` with `{"fuyou_store": VERSION, "files": [...]}`. The first file lies beside the
manifest: a copied manifest names the files of another store. The files lie in folders named `<run>`, one per drive, each with a
part file that names the store, and carry file names that a run gives. No folder is removed but an empty `companions` beside a
manifest, and its empty folder of chat templates.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...checkpoint.files import TEMPLATE_FOLDER
from ...core.disk import status_of
from ...core.errors import FuyouError, UsageError
from ...core.json_files import find_text, object_in, shown
from ...core.paths import is_same_folder
from .manifest import BESIDE, COMPANIONS, LARGEST, VERSION, found_in
from .manifest import NAME as MANIFEST
from .parts import PART_FILE, STORE_FILE, is_written, read_part
from .places import forget


@dataclass(frozen=True, kw_only=True, slots=True)
class Remnant:
    """Names a file that may be removed. Its size on disk may change while a run still writes to it."""

    path: Path
    taken: int = field(compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreFiles:
    """Lists what a manifest names. If `refused` is not empty, nothing of the store is removed."""

    manifest: Path
    digest: str = ""  # of the manifest's content
    files: tuple[Remnant, ...] = ()
    missing: int = 0
    refused: tuple[str, ...] = ()


def find_manifests(directory: Path) -> list[Path]:
    """Finds the manifest of the folder itself if it is a store, otherwise those of the stores in it."""
    if (status := status_of(directory)) is None or not stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{directory} is not a folder")
    return [folder / MANIFEST for folder in found_in(directory, MANIFEST)]


def find_unnamed(directory: Path, stores: Sequence[StoreFiles]) -> list[Path]:
    """Finds files that look like a store's, in the folder or one level below, but that none of these stores names."""
    named = {file.path for store in stores for file in store.files}
    found = [directory / STORE_FILE, *sorted(directory.glob(f"*/{STORE_FILE}"))]
    beside = (path for path in found if path.is_file() and not path.is_symlink() and not (path.parent / MANIFEST).is_file())
    return [path for path in beside if path.absolute() not in named]


def read_store(manifest: Path) -> StoreFiles:
    """Looks at what the manifest names, without following links."""
    if manifest.is_symlink() or manifest.parent.is_symlink():
        return StoreFiles(manifest=manifest, refused=("the store's folder or manifest is a symbolic link",))
    try:
        text = find_text(manifest, limit=LARGEST)
        if text is None:
            raise UsageError("the manifest is gone")
        content = object_in(manifest, text, finite=False, names=True)
        wanted, names = _named(manifest, content)
    except UsageError as error:
        return StoreFiles(manifest=manifest, refused=(error.message,))
    looked = {name: _look(name, manifest.parent.resolve(), content) for name in names}
    return StoreFiles(
        manifest=manifest,
        digest=hashlib.sha256(text.encode()).hexdigest(),
        files=tuple(found for found in looked.values() if isinstance(found, Remnant)),
        missing=sum(found is None and name in wanted for name, found in looked.items()),
        refused=tuple(f"{_printable(name)}: {why}" for name, why in looked.items() if isinstance(why, str)),
    )


def _printable(name: str) -> str:
    return name if name.isprintable() and len(name) <= 4096 else shown(name)


def _named(manifest: Path, content: dict[str, Any]) -> tuple[set[str], list[str]]:
    """Returns the files that certainly existed, and all files, each once. Raises UsageError if the manifest cannot be
    trusted. Every version lists its files the same way, so stores of older versions can be removed too."""
    version = content.get("fuyou_store")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise UsageError(f"not the manifest of a fuyou store of version 1 to {VERSION}")
    kinds = [content.get("files"), content.get("parts", []), content.get("companions", [])]
    for names in kinds:
        if not isinstance(names, list) or not all(isinstance(name, str) and "\0" not in name for name in names):
            raise UsageError("the manifest does not list its files")
    files, parts, companions = kinds
    if files and not is_same_folder(Path(files[0]).parent, manifest.parent):
        raise UsageError(f"a copy, or moved: what it names is in {shown(str(Path(files[0]).parent))}")
    return {*files, *parts}, list(dict.fromkeys((*files, *parts, *companions)))


def _look(name: str, home: Path, content: dict[str, Any]) -> Remnant | str | None:
    """Say what a file takes, or why it is left alone; None when it is gone already."""
    path = Path(name)
    if not path.is_absolute() or ".." in path.parts:
        return "not a plain absolute path"
    try:
        if reason := _foreign(path.parent, home, content):
            return reason
        if not is_written(path):
            return "not a file name that a run uses"
        status = path.lstat()
    except FileNotFoundError:
        return None
    except FuyouError as error:
        return error.message
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        return getattr(error, "strerror", None) or "cannot be read"
    if not stat.S_ISREG(status.st_mode):
        return "a symbolic link or not a file"
    if status.st_nlink > 1 and path.name not in (MANIFEST, *BESIDE):  # a run gives these second names
        return "has a second name (hard link)"
    return Remnant(path=path, taken=status.st_blocks * 512 // status.st_nlink)


def _foreign(folder: Path, home: Path, content: dict[str, Any]) -> str:
    """Tells why the folder cannot hold a file of the store `home`, or why a missing file may not count as removed. Empty if
    all is well."""
    of_templates = (folder.parent.name, folder.name) == (COMPANIONS, TEMPLATE_FOLDER) and not folder.is_symlink()
    inner = folder.parent if of_templates else folder
    above = inner.parent if inner.name == COMPANIONS and not inner.is_symlink() else inner
    if is_same_folder(above, home):
        return ""
    if folder.name != home.name or folder.is_symlink():
        return f"not in a folder named {home.name}"
    if not folder.exists():  # removing files keeps the folder, so a missing folder is an unmounted drive
        return "its folder is missing: mount its drive; if the drive is lost, remove the other files by hand"
    part, is_loading = read_part(folder), content.get("state") == "loading"
    if part is None and not (folder / PART_FILE).exists() and (is_loading or not (folder / STORE_FILE).exists()):
        return ""  # the run was killed before it wrote the part file, or an earlier `clean` was interrupted after removing it
    # A run that starts over names itself before it claims the folders anew, which were this store's before. Older stores name
    # no run.
    is_its_own = part is not None and (is_loading or content.get("run") in (None, part.run))
    if part is None or not is_its_own or not is_same_folder(part.first, home):
        return f"no {PART_FILE} beside it says that it belongs to this store"
    return ""


def remove_store(store: StoreFiles) -> int:
    """Removes the files first and the manifest last, so that an interrupted removal can be repeated. Returns the bytes freed.

    Raises FuyouError if a run has the store open, or has changed it since it was read.
    """
    with ExitStack() as held:
        _hold([store.manifest, *(file.path for file in store.files)], held)
        if read_store(store.manifest) != store:
            raise _changed(store.manifest)
        for file in store.files:
            file.path.unlink()
        companions = store.manifest.parent / COMPANIONS
        for folder in (companions / TEMPLATE_FOLDER, companions) if not companions.is_symlink() else ():
            with suppress(OSError):  # it is not there, or holds what no manifest names
                folder.rmdir()
        store.manifest.unlink()
    forget(store.manifest.parent)
    return sum(file.taken for file in store.files)


def _hold(paths: Sequence[Path], held: ExitStack) -> None:
    """Takes the lock that a run would hold, once for a file with two names."""
    known: set[tuple[int, int]] = set()
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise _changed(path) from None
        held.callback(os.close, descriptor)
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) in known:
            continue
        known.add((status.st_dev, status.st_ino))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "stop that run first (Ctrl-C saves it)"
            raise FuyouError(f"{path} is in use by a running fuyou", hint=hint) from None


def _changed(path: Path) -> FuyouError:
    return FuyouError(f"{path} has changed since it was listed, so it was not removed", hint="run the same command again")
