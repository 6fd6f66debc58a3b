"""`fuyou clean`: remove the store files a manifest names, and nothing else.

A store is `<folder>/<run>/manifest.json` with `{"fuyou_store": VERSION, "files": [...]}`, the first of which lies beside it: a
copy of a store names the files of another. Its files lie in folders named `<run>`, one per drive it is striped over, each with
a part file that says so, and have names that a run gives. No folder is ever removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from fuyou_cli.core.errors import FuyouError, UsageError
from fuyou_cli.core.json_files import find_text, object_in, shown
from fuyou_cli.core.paths import is_file, is_same_folder
from fuyou_cli.core.units import gib
from fuyou_cli.training.state.folder_names import STORE, is_written
from fuyou_cli.training.state.manifest import BEFORE, BESIDE, COMPANIONS, LARGEST, VERSION
from fuyou_cli.training.state.manifest import NAME as MANIFEST
from fuyou_cli.training.state.parts import PART_FILE, read_part

from .console import confirm, write_result, write_status


@dataclass(frozen=True, kw_only=True, slots=True)
class Remnant:
    """A file that may go: `size` bytes long, `taken` of the disk, which may change while the disk is still being written to."""

    path: Path
    size: int = field(compare=False)
    taken: int = field(compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreFiles:
    """One manifest and what it names. Nothing of a store with refusals is removed."""

    manifest: Path
    digest: str  # of what the manifest says
    files: tuple[Remnant, ...]
    missing: int
    refused: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Named:
    """What a manifest says of its store. `certain` are there unless they are gone already, `possible` may never have been."""

    certain: tuple[str, ...] = ()
    possible: tuple[str, ...] = ()
    run: object = None  # which older ones do not say
    is_loading: bool = False
    problem: str = ""


def run_clean(directory: Path, *, yes: bool) -> None:
    stores = [read_store(manifest) for manifest in find_manifests(directory)]
    unnamed = find_unnamed(directory, stores)
    for store in stores:
        _show(store)
    for file in unnamed:
        _show_unnamed(file)
    removable = [store for store in stores if not store.refused]
    total = sum(file.taken for store in removable for file in store.files)
    if removable and _agreed(total, yes):
        freed = sum(remove_store(store) for store in removable)
        write_result(f"removed {gib(freed)} ({freed:,} bytes)")
    if len(removable) < len(stores):
        raise FuyouError(f"{len(stores) - len(removable)} of {len(stores)} stores were left as they are, see above")
    if not stores:
        raise UsageError(f"no store under {directory}: no {MANIFEST} in it or one level below")


def find_manifests(directory: Path) -> list[Path]:
    """Of the folder itself when it is a store, else of the stores in it."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a folder")
    own = directory / MANIFEST
    if own.is_file():
        return [own]
    return sorted(path for path in directory.glob(f"*/{MANIFEST}") if path.is_file())


def find_unnamed(directory: Path, stores: Sequence[StoreFiles]) -> list[Path]:
    """Files that look like a store's, in the folder or one level below, and that none of these stores names."""
    named = {file.path for store in stores for file in store.files}
    found = [directory / STORE, *sorted(directory.glob(f"*/{STORE}"))]
    beside = (path for path in found if path.is_file() and not path.is_symlink() and not (path.parent / MANIFEST).is_file())
    return [path for path in beside if path.absolute() not in named]


def read_store(manifest: Path) -> StoreFiles:
    """What the manifest names, looked at without following a link."""
    text, problem = _text(manifest)
    named = _Named(problem=problem) if problem else _named(manifest, text)
    home = manifest.parent.resolve()
    files, refused, missing = [], [named.problem] if named.problem else [], 0
    if manifest.is_symlink() or manifest.parent.is_symlink():
        refused.append("the store's folder or manifest is a symbolic link")
    for name in (*named.certain, *named.possible):
        reason, remnant = _look(name, home, named)
        if reason:
            refused.append(f"{name if name.isprintable() and len(name) <= 4096 else shown(name)}: {reason}")
        elif remnant is None:
            missing += name not in named.possible
        else:
            files.append(remnant)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return StoreFiles(manifest=manifest, digest=digest, files=tuple(files), missing=missing, refused=tuple(refused))


def _text(manifest: Path) -> tuple[str, str]:
    """What the manifest says, and why it cannot be read."""
    try:
        text = find_text(manifest, limit=LARGEST)
    except UsageError as error:
        return "", f"the manifest cannot be read: {error.message}"
    return ("", "the manifest is gone") if text is None else (text, "")


def _named(manifest: Path, text: str) -> _Named:
    """The files of a store, each once, or why the manifest cannot be believed."""
    try:
        content = object_in(manifest, text, finite=False, names=True)
    except UsageError as error:
        return _Named(problem=f"the manifest cannot be read: {error.message}")
    # Every version so far lists its files the same way, so that stores of older versions can go as well.
    version = content.get("fuyou_store")
    if type(version) is not int or not 1 <= version <= VERSION:
        return _Named(problem=f"not the manifest of a fuyou store of version 1 to {VERSION}")
    kinds = [content.get("files"), content.get("parts", []), content.get("companions", [])]
    for names in kinds:
        if not isinstance(names, list) or not all(isinstance(name, str) and "\0" not in name for name in names):
            return _Named(problem="the manifest does not list its files")
    files, parts, companions = kinds
    if files and not is_same_folder(Path(files[0]).parent, manifest.parent):
        return _Named(problem=f"a copy, or moved: what it names is in {shown(str(Path(files[0]).parent))}")
    certain = tuple(dict.fromkeys((*files, *parts)))
    possible = tuple(dict.fromkeys(name for name in companions if name not in certain))
    run, state = content.get("run"), content.get("state")
    return _Named(certain=certain, possible=possible, run=run, is_loading=state == "loading")


def _look(text: str, home: Path, named: _Named) -> tuple[str, Remnant | None]:
    """Why this file is left alone, or what it takes; neither when it is gone already."""
    path = Path(text)
    if not path.is_absolute() or ".." in path.parts:
        return "not a plain absolute path", None
    try:
        if reason := _foreign(path.parent, home, named):
            return reason, None
        if not is_written(path):
            return "not called as any file of a run is", None
        status = path.lstat()
        names = _own_names(path, status)
    except FileNotFoundError:
        return "", None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        return getattr(error, "strerror", None) or "cannot be looked at", None
    if not stat.S_ISREG(status.st_mode):
        return "a symbolic link or not a file", None
    if status.st_nlink > names:
        return "has a second name (hard link)", None
    return "", Remnant(path=path, size=status.st_size, taken=status.st_blocks * 512 // status.st_nlink)


def _foreign(folder: Path, home: Path, named: _Named) -> str:
    """Why no file of the store `home` can lie in the folder, or may be taken for gone; empty where one may be in it."""
    above = folder.parent if folder.name == COMPANIONS and not folder.is_symlink() else folder
    if is_same_folder(above, home):
        return ""
    if folder.name != home.name or folder.is_symlink():
        return f"not in a folder named {home.name}"
    if not folder.exists():  # folders stay where files are removed: what was in it would be nobody's
        return "its folder is not there: mount its drive; where that is lost for good, remove the rest by hand"
    part = read_part(folder)
    if part is None and not (folder / PART_FILE).exists() and (named.is_loading or not (folder / STORE).exists()):
        return ""  # a run was killed before it wrote that, or this was interrupted after it was removed
    # A run that starts over names itself before it claims the folders anew, which were this store's before.
    is_its_own = part is not None and (named.is_loading or named.run in (None, part.run))
    if part is None or not is_its_own or not is_same_folder(part.first, home):
        return f"no {PART_FILE} beside it says that it is of this store"
    return ""


def _own_names(path: Path, status: os.stat_result) -> int:
    """How many names a run itself gave to the file: a manifest that is set aside has two or three for a moment, and keeps them
    where the run is killed in it."""
    names = (MANIFEST, *BESIDE)
    return sum(_is_same(path.with_name(name), status) for name in names) if path.name in names else 1


def _is_same(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.lstat(), status)
    except FileNotFoundError:
        return False


def _show(store: StoreFiles) -> None:
    write_result(f"{store.manifest.parent}")
    for file in store.files:
        write_result(f"  {gib(file.taken):>12}  {file.path}  ({file.taken:,} bytes)")
    if store.missing:
        write_result(f"  {store.missing} named files are gone already")
    for reason in store.refused:
        write_status(f"  refused: {reason}")


def _show_unnamed(file: Path) -> None:
    """A store's file without its manifest is not removed: which run it is of, and whether that needs it, is not known here."""
    taken = file.stat().st_blocks * 512
    write_status(f"{file.parent}\n  {gib(taken):>12}  {file}  ({taken:,} bytes)")
    part = read_part(file.parent)
    if (file.parent / BEFORE).is_file():
        why = f"{MANIFEST} is gone, and {BEFORE} is there: the run goes on from that"
    elif part is not None and part.index:
        first = part.first if part.first.isprintable() else shown(part.first)
        why = f"part {part.index + 1} of {part.count} of the store in {first}"
        if is_file(Path(part.first) / MANIFEST):
            why += ": name that one"
        else:
            why += ", which is gone or not mounted: without that nothing can use it"
    else:
        why = "a run that is killed as it begins leaves such a file. Run again, it uses it; else remove it by hand"
    write_status(f"  left as it is, for no {MANIFEST} names it: {why}")


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

    Raises FuyouError when a run has the store open, or had it since it was read.
    """
    freed = 0
    with ExitStack() as held:
        _hold([store.manifest, *(file.path for file in store.files)], held)
        if read_store(store.manifest) != store:
            raise _changed(store.manifest)
        for file in store.files:
            file.path.unlink()
            freed += file.taken
        store.manifest.unlink()
    return freed


def _hold(paths: Sequence[Path], held: ExitStack) -> None:
    """Lock what a run would have locked; a file of two names once."""
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
    return FuyouError(f"{path} has changed since it was listed: it was left as it is", hint="run the same command again")
