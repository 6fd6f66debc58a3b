"""`fuyou clean`: remove the store files a manifest names, and nothing else.

A store is `<folder>/<run>/manifest.json` with `{"fuyou_store": VERSION, "files": [...]}`; its files lie in folders named
`<run>`, one per drive it is striped over. No folder is ever removed.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from fuyou_cli.core.errors import FuyouError, UsageError
from fuyou_cli.core.json_files import read_object, shown
from fuyou_cli.core.units import gib
from fuyou_cli.training.manifest import COMPANIONS, LARGEST, VERSION
from fuyou_cli.training.manifest import NAME as MANIFEST

from .console import confirm, write_result, write_status


@dataclass(frozen=True, kw_only=True, slots=True)
class Remnant:
    """A file that may go: `size` bytes long, `taken` of the disk."""

    path: Path
    size: int
    taken: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreFiles:
    """One manifest and what it names. Nothing of a store with refusals is removed."""

    manifest: Path
    files: tuple[Remnant, ...]
    missing: int
    refused: tuple[str, ...]


def run_clean(directory: Path, *, yes: bool) -> None:
    stores = [read_store(manifest) for manifest in find_manifests(directory)]
    if not stores:
        raise UsageError(f"no store under {directory}: no {MANIFEST} in it or one level below")
    for store in stores:
        _show(store)
    removable = [store for store in stores if not store.refused]
    total = sum(file.taken for store in removable for file in store.files)
    if removable and _agreed(total, yes):
        freed = sum(remove_store(store) for store in removable)
        write_result(f"removed {gib(freed)} ({freed:,} bytes)")
    if len(removable) < len(stores):
        raise FuyouError(f"{len(stores) - len(removable)} of {len(stores)} stores were left as they are, see above")


def find_manifests(directory: Path) -> list[Path]:
    """Of the folder itself when it is a store, else of the stores in it."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a folder")
    own = directory / MANIFEST
    if own.is_file():
        return [own]
    return sorted(path for path in directory.glob(f"*/{MANIFEST}") if path.is_file())


def read_store(manifest: Path) -> StoreFiles:
    """What the manifest names, looked at without following a link."""
    named, may_be, problem = _named(manifest)  # each name once, however many there are
    home = manifest.parent.resolve()
    files, refused, missing = [], [problem] if problem else [], 0
    if manifest.is_symlink() or manifest.parent.is_symlink():
        refused.append("the store's folder or manifest is a symbolic link")
    for text in (*named, *may_be):
        reason, remnant = _look(text, home)
        if reason:
            refused.append(f"{text if text.isprintable() and len(text) <= 4096 else shown(text)}: {reason}")
        elif remnant is None:
            missing += text not in may_be
        else:
            files.append(remnant)
    return StoreFiles(manifest=manifest, files=tuple(files), missing=missing, refused=tuple(refused))


def _named(manifest: Path) -> tuple[dict[str, None], dict[str, None], str]:
    """The files of a store, those that there may be beside them, and why the manifest cannot be believed."""
    try:
        content = read_object(manifest, limit=LARGEST, finite=False, names=True)
    except UsageError as error:
        return {}, {}, f"the manifest cannot be read: {error.message}"
    # Every version so far lists its files the same way, so that stores of older versions can go as well.
    version = content.get("fuyou_store")
    if type(version) is not int or not 1 <= version <= VERSION:
        return {}, {}, f"not the manifest of a fuyou store of version 1 to {VERSION}"
    kinds = [content.get("files"), content.get("parts", []), content.get("companions", [])]
    for names in kinds:
        if not isinstance(names, list) or not all(isinstance(name, str) and "\0" not in name for name in names):
            return {}, {}, "the manifest does not list its files"
    files, parts, companions = kinds
    named = dict.fromkeys((*files, *parts))
    return named, dict.fromkeys(name for name in companions if name not in named), ""


def _look(text: str, home: Path) -> tuple[str, Remnant | None]:
    """Why this file is left alone, or what it takes; neither when it is gone already."""
    path = Path(text)
    if not path.is_absolute() or ".." in path.parts:
        return "not a plain absolute path", None
    try:
        if not _is_ours(path.parent, home):
            return f"not in a folder named {home.name}", None
        status = path.lstat()
    except FileNotFoundError:
        return "", None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        return getattr(error, "strerror", None) or "cannot be looked at", None
    if not stat.S_ISREG(status.st_mode):
        return "a symbolic link or not a file", None
    if status.st_nlink > 1:
        return "has a second name (hard link)", None
    return "", Remnant(path=path, size=status.st_size, taken=status.st_blocks * 512)


def _is_ours(folder: Path, home: Path) -> bool:
    """Whether files of the store `home` may lie in it: a folder of its name, or the companions' in such a one."""
    if folder.name == COMPANIONS and not folder.is_symlink():
        folder = folder.parent
    return folder.resolve() == home or (folder.name == home.name and not folder.is_symlink())


def _show(store: StoreFiles) -> None:
    write_result(f"{store.manifest.parent}")
    for file in store.files:
        write_result(f"  {gib(file.taken):>12}  {file.path}  ({file.taken:,} bytes)")
    if store.missing:
        write_result(f"  {store.missing} named files are gone already")
    for reason in store.refused:
        write_status(f"  refused: {reason}")


def _agreed(total: int, yes: bool) -> bool:
    if yes:
        return True
    answer = confirm(f"Remove these files and their manifests, {gib(total)}?")
    if answer is None:
        raise UsageError("nothing was removed: there is no terminal to ask at", hint="add --yes")
    if not answer:
        write_status("nothing was removed")
    return answer


def remove_store(store: StoreFiles) -> int:
    """Files first, the manifest last, so that an interrupted removal can be repeated. Returns the bytes freed.

    Raises FuyouError when a run has the store open.
    """
    freed = 0
    with ExitStack() as held:
        for path in [store.manifest, *(file.path for file in store.files)]:
            _hold(path, held)
        for file in store.files:
            file.path.unlink()
            freed += file.taken
        store.manifest.unlink()
    return freed


def _hold(path: Path, held: ExitStack) -> None:
    """Lock what a run would have locked."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FuyouError(f"{path} is in use by a running fuyou", hint="stop that run first (Ctrl-C saves it)") from None
