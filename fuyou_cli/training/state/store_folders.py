"""The folders of a run's store: whose they are, which file systems they are on, who uses them, and what `fuyou clean` removes.

A store is `<folder>/<run>/manifest.json` with `{"fuyou_store": VERSION, "files": [...]}`. The first file lies beside the
manifest: a copied manifest names the files of another store. The files lie in folders named `<run>`, one per drive, each with a
part file that names the store, and carry file names that a run gives.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import re
import stat
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from ...checkpoint.files import TEMPLATE_FOLDER
from ...core.disk import (
    failed_writing,
    file_size,
    file_systems,
    status_of,
    store_files,
    sync_directory,
    sync_names_above,
    unreadable,
)
from ...core.errors import FuyouError, OutOfSpaceError, UsageError
from ...core.json_files import find_object, find_text, from_json, legible, object_in, shown
from ...core.paths import is_same_folder, keep_file, kept_folder, open_own, write_own
from ...core.probe import file_system_of
from . import manifest as manifests
from .kept_companions import is_kept
from .manifest import Manifest

# ---- the files of a store, and whose its folders are ------------------------------------------------------------------

STORE_FILE = "store.bin"
LOSSES = "losses.bin"  # of all committed steps, eight bytes each
SPARE = "spare"  # beside the first store file: reserved disk, so that the last manifest can be written on a full disk
PART_FILE = "part.json"
NEW_PART = ".part.new"  # a fixed name, so that the next run overwrites what a killed run left
_FILES = frozenset((STORE_FILE, SPARE, PART_FILE, NEW_PART, LOSSES, *manifests.BESIDE))
_LARGEST = 1 << 16  # bytes
_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StorePart:
    """Describes one folder of a store: part `index` of `count` of the run `run`, whose manifest is in `first`."""

    run: str
    index: int
    count: int
    first: str


def name_of_run(output_dir: Path) -> str:
    """Returns the name of the folders of the store of a run with this output_dir: readable, and of no other one."""
    out = output_dir.resolve()
    return f"{out.name}-{hashlib.sha256(os.fsencode(out)).hexdigest()[:8]}"


_OF_RANK = re.compile(r"\.r[0-9]+of([0-9]+)$")


def of_rank(rank: int | str, count: int | str) -> str:
    """Returns how the name of a folder ends that holds the share of one of `count` ranks."""
    return f".r{rank}of{count}"


def unranked(folder: Path) -> Path:
    """Returns the folder that one process alone would have in place of a rank's."""
    name = _OF_RANK.sub("", folder.name)
    return folder.with_name(name) if name else folder


def rank_count(folder: Path) -> int:
    """Returns how many ranks the run has whose folder is named so."""
    named = _OF_RANK.search(folder.name)
    return 1 if named is None else int(named[1])


def of_any_count(folder: Path) -> list[Path]:
    """Returns the folders beside this one that the same run has with any number of ranks, as far as they are there."""
    alone = unranked(folder)
    ranked = sorted(alone.parent.glob(f"{glob.escape(alone.name)}{of_rank('[0-9]*', '[0-9]*')}"))
    own = [place for place in ranked if unranked(place) == alone]  # a copy beside them may have more behind the same name
    return [place for place in (alone, *own) if place.is_dir()]


def newest_saved(folders: Sequence[Path]) -> Path:
    """Returns which of these folders of a run, of any number of ranks, has the newest saved state; of ranks the first one's."""
    if len(folders) == 1:
        return folders[0]
    newest = max(folders, key=lambda place: (_is_saved(place), manifests.written_at(place)))
    return min(place for place in folders if rank_count(place) == rank_count(newest))


def _is_saved(place: Path) -> bool:
    with suppress(UsageError):
        saved, _ = manifests.newest(place)
        return saved is not None and saved.state == "committed"
    return False


def is_plain(path: str) -> bool:
    """Tells whether a part file may name this path: it must be absolute and without `..`."""
    return "\0" not in path and PurePath(path).is_absolute() and ".." not in PurePath(path).parts


def is_written(path: Path) -> bool:
    """Tells whether a run may write a file of this name: in its folder, in its companions' or in that of their chat templates.
    Other files are not removed."""
    *_, above, folder, name = ("", "", *path.parts[-3:])
    if (above, folder) == (manifests.COMPANIONS, TEMPLATE_FOLDER):
        return is_kept(f"{TEMPLATE_FOLDER}/{name}")
    return is_kept(name) if folder == manifests.COMPANIONS else name in _FILES


def part_size(store_size: int, *, stripe: int, count: int, index: int) -> int:
    """Returns the bytes of file `index` of a store over `count` files: whole stripes in turn, then the tail."""
    full, tail = divmod(store_size, stripe)
    rounds, left = divmod(full, count)
    return (rounds + (index < left)) * stripe + (tail if index == left else 0)


def missing_file(manifest: Manifest) -> str:
    """Names the first file of the store that is missing or too short. Empty if all are complete. Raises UnreadableError where
    a drive or a permission hides one."""
    for index, name in enumerate(manifest.files):
        least = part_size(manifest.store_size, stripe=manifest.stripe, count=len(manifest.files), index=index)
        size = file_size(name)
        if size is None or size < least:
            what = "is missing" if size is None else f"has {size:,} bytes, but needs at least {least:,}"
            return f"{name} {what}"
    return ""


def check_space(paths: Sequence[Path], size: int) -> None:
    """Raises OutOfSpaceError if the disks have no room for the store, before anything is written."""
    for disk in file_systems(store_files(paths, size)):
        if disk.problem:
            raise OutOfSpaceError(
                disk.problem, hint="free some space, or name another directory in offload.dir; several are striped"
            )


def write_parts(run: str, directories: Sequence[Path]) -> None:
    """Claims the folders for a run, on stable storage. First removes manifests of runs that used them before."""
    for index, directory in enumerate(directories):
        try:
            for name in manifests.EVERY_NAME if index else ():
                (directory / name).unlink(missing_ok=True)
            _write_part(run, directories, index)
        except OSError as error:
            raise failed_writing(directory / PART_FILE, error) from error


def _write_part(run: str, directories: Sequence[Path], index: int) -> None:
    directory = directories[index]
    part = StorePart(run=run, index=index, count=len(directories), first=str(directories[0]))
    write_own(directory / NEW_PART, [json.dumps({"fuyou_part": _VERSION, **asdict(part)}).encode(), b"\n"])
    (directory / NEW_PART).replace(directory / PART_FILE)
    sync_directory(directory)
    sync_names_above(directory)


def begin_parts(run: str, directories: Sequence[Path]) -> list[Path]:
    """Makes the store's files that are missing, empty, and says beside each whose it is. Returns those that it made.

    A run may be killed before its first manifest. Then a file that has its size would pass for somebody's data where a file
    system does not tell room from data; an empty one does not, and one with a part file of a run without a manifest neither.
    """
    created = []
    for index, directory in enumerate(directories):
        path = directory / STORE_FILE
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise failed_writing(path, error) from error
        created.append(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody else writes the part file meanwhile
            _write_part(run, directories, index)
        except BlockingIOError:  # somebody was quicker, and has it: opening the store says so
            created.remove(path)
        except OSError as error:
            discard_parts(created)
            raise failed_writing(directory / PART_FILE, error) from error
        finally:
            os.close(descriptor)
    return created


def discard_parts(created: Sequence[Path]) -> None:
    """Removes store files that `begin_parts` made, with their part files."""
    for path in created:
        path.unlink(missing_ok=True)
        path.with_name(PART_FILE).unlink(missing_ok=True)


def read_part(directory: Path) -> StorePart | None:
    """Returns the part that `directory` is, or None if there is no part file or it is not valid. Raises UnreadableError where
    it cannot be read now."""
    path = directory / PART_FILE
    try:
        content = find_object(path, limit=_LARGEST, names=True)
        if content is None or content.pop("fuyou_part", None) != _VERSION:
            return None
        part = from_json(StorePart, content)
    except UsageError as error:
        cause = error.__context__
        if isinstance(cause, OSError) and cause.errno not in manifests.NO_FILE:
            raise unreadable(path, cause) from None
        return None
    return part if part.index < part.count and is_plain(part.first) else None


# ---- losses -----------------------------------------------------------------------------------------------------------

# The file is written before the manifest that counts its losses, and read up to that count. The next run overwrites what a
# killed run left behind it.
_LOSS = struct.Struct("<d")


def write_losses(directory: Path, losses: Sequence[float], *, first: int = 0) -> None:
    """Writes the losses of the steps from `first` on (0 for step 1) to stable storage. Earlier losses that are lost become
    NaN."""
    path = directory / LOSSES
    try:
        with os.fdopen(open_own(path, anew=False), "wb") as file:
            held = min(first, os.fstat(file.fileno()).st_size // _LOSS.size)
            file.seek(held * _LOSS.size)
            file.writelines(_LOSS.pack(loss) for loss in (*[math.nan] * (first - held), *losses))
            file.flush()
            os.fdatasync(file.fileno())
        if not held:
            sync_directory(directory)
    except OSError as error:
        raise failed_writing(path, error) from error


def read_losses(directory: Path, count: int) -> tuple[list[float], str]:
    """Returns the losses of the first `count` steps, with NaN for those that cannot be read, and a note that says so."""
    path = directory / LOSSES
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # the file may be a pipe
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(min(count * _LOSS.size, os.fstat(file.fileno()).st_size))
        problem = "" if len(content) == count * _LOSS.size else "it is too short"
    except OSError as error:
        content, problem = b"", error.strerror or "it cannot be read"
    items = content[: len(content) // _LOSS.size * _LOSS.size]
    losses = [value for (value,) in _LOSS.iter_unpack(items)]
    note = f"{path}: {problem}; the losses of earlier steps are not known" if problem and count else ""
    return losses + [math.nan] * (count - len(losses)), note


# ---- use --------------------------------------------------------------------------------------------------------------

_DYING = 1.0  # seconds that a killed process may need to end


def refuse_copy(manifest: Manifest, source: Path) -> None:
    """Raises UsageError if the manifest in `source` belongs to a store elsewhere: `source` is a copy of it, or was moved."""
    home = Path(manifest.files[0]).parent
    if is_same_folder(home, source):
        return
    if file_size(manifest.files[0]) is not None:
        raise UsageError(
            f"{source} is a copy of the store in {home}: its manifest names the files there",
            hint=f"name {home}; a copy can be used only if it is moved there",
        )
    raise UsageError(
        f"{source} holds a run that was saved after step {manifest.step} in {home} and moved since",
        hint="move it back, or mount it at that path too (mount --bind), and name its folders as before; a run that starts "
        "over (checkpoint.resume=never) gives the saved state up",
    )


def refuse_in_use(manifest: Manifest) -> None:
    """Raises FuyouError while a running fuyou uses the store. Waits for the kernel to end the I/O of a killed one (about 40
    ms)."""
    until = time.monotonic() + _DYING
    while name := _in_use(manifest):
        if time.monotonic() >= until:
            raise FuyouError(f"{name} is in use by a running fuyou", hint="stop that run first (Ctrl-C saves it)")
        time.sleep(_DYING / 20)


def _in_use(manifest: Manifest) -> str:
    """Returns the name of a file of the store that a process has locked, or an empty string. Raises UnreadableError where that
    cannot be found out."""
    for name in manifest.files:
        if file_size(name) is None:
            continue
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):  # the store refuses a link by name
                continue
            raise unreadable(name, error) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return name
        except OSError as error:
            raise unreadable(name, error, verb="locked") from None
        finally:
            os.close(descriptor)
    return ""


# ---- drives -----------------------------------------------------------------------------------------------------------

_MOST = 1000  # runs, the newest ones


def remember_drives(directories: Sequence[Path], *, say: Callable[[str], None]) -> None:
    """Notes what file systems a run's folders are on now."""
    place = _file_of(directories[0])
    names = [file_system_of(directory) for directory in directories]
    known = {str(folder): [name.identity, name.told] for folder, name in zip(directories, names, strict=True)}
    try:
        keep_file(place, json.dumps(known).encode(), most=_MOST)
    except OSError as error:
        say(f"note: cannot keep in {place} where the store is ({error.strerror}): keep its drive mounted")


def forget_drives(directory: Path) -> None:
    """Forgets a run whose store is removed. `directory`: its first folder."""
    with suppress(OSError):
        _file_of(directory).unlink(missing_ok=True)


def check_mounted(directories: Sequence[Path]) -> None:
    """Raises UsageError if a folder of a run that begins anew was on another file system when the run was last there."""
    try:
        known = find_object(_file_of(directories[0]), limit=_LARGEST, names=True) or {}
    except UsageError:  # advice that cannot be read
        return
    for directory in directories:
        check_same_drive(directory, known.get(str(directory)))


def check_same_drive(directory: Path, was: object) -> None:
    """Raises UsageError if a folder is on another file system than it `was`: its identity and name, if known."""
    match was:
        case (str(identity), str(told)) if identity != (now := file_system_of(directory)).identity:
            raise UsageError(
                f"{directory} was on another drive when this run was last there ({told}), and is on {now.told} now",
                hint="mount that drive again: then the same command continues from what is saved there. To begin anew on this "
                "one: checkpoint.resume=never",
            )


def _file_of(directory: Path) -> Path:
    name = hashlib.sha256(bytes(directory.absolute())).hexdigest()[:24]
    return kept_folder() / "stores" / f"{name}.json"


# ---- removal ----------------------------------------------------------------------------------------------------------


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
    return [folder / manifests.NAME for folder in manifests.found_in(directory, manifests.NAME)]


def find_unnamed(directory: Path, stores: Sequence[StoreFiles]) -> list[Path]:
    """Finds files that look like a store's, in the folder or one level below, but that none of these stores names."""
    named = {file.path for store in stores for file in store.files}
    stores_there = [directory / STORE_FILE, *sorted(directory.glob(f"*/{STORE_FILE}"))]
    unnamed = (
        path
        for path in stores_there
        if path.is_file() and not path.is_symlink() and not (path.parent / manifests.NAME).is_file()
    )
    return [path for path in unnamed if path.absolute() not in named]


def read_store(manifest: Path) -> StoreFiles:
    """Looks at what the manifest names, without following links."""
    if manifest.is_symlink() or manifest.parent.is_symlink():
        return StoreFiles(manifest=manifest, refused=("the store's folder or manifest is a symbolic link",))
    try:
        text = find_text(manifest, limit=manifests.LARGEST)
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
        files=tuple(remnant for remnant in looked.values() if isinstance(remnant, Remnant)),
        missing=sum(remnant is None and name in wanted for name, remnant in looked.items()),
        refused=tuple(f"{legible(name)}: {why}" for name, why in looked.items() if isinstance(why, str)),
    )


def _named(manifest: Path, content: dict[str, Any]) -> tuple[set[str], list[str]]:
    """Returns the files that certainly existed, and all files, each once. Raises UsageError if the manifest cannot be
    trusted. Every version lists its files the same way, so stores of older versions can be removed too."""
    version = content.get("fuyou_store")
    if type(version) is not int or not 1 <= version <= manifests.VERSION:
        raise UsageError(f"not the manifest of a fuyou store of version 1 to {manifests.VERSION}")
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
    if status.st_nlink > 1 and path.name not in (manifests.NAME, *manifests.BESIDE):  # a run gives these second names
        return "has a second name (hard link)"
    return Remnant(path=path, taken=status.st_blocks * 512 // status.st_nlink)


def _foreign(folder: Path, home: Path, content: dict[str, Any]) -> str:
    """Tells why the folder cannot hold a file of the store `home`, or why a missing file may not count as removed. Empty if
    all is well."""
    of_templates = (folder.parent.name, folder.name) == (manifests.COMPANIONS, TEMPLATE_FOLDER) and not folder.is_symlink()
    inner = folder.parent if of_templates else folder
    above = inner.parent if inner.name == manifests.COMPANIONS and not inner.is_symlink() else inner
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
        companions = store.manifest.parent / manifests.COMPANIONS
        for folder in (companions / TEMPLATE_FOLDER, companions) if not companions.is_symlink() else ():
            with suppress(OSError):  # it is not there, or holds what no manifest names
                folder.rmdir()
        store.manifest.unlink()
    forget_drives(store.manifest.parent)
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


def remove_elsewhere(folder: Path, run: str, step: int, *, also: Sequence[Path], say: Callable[[str], None]) -> None:
    """Removes the stores that other numbers of ranks have of a run that is committed in `folder` after `step`. `also`: where
    they may be, but beside it.

    Killed at any moment, it leaves nothing that ranks would go on from or be refused for in place of what is in `folder`: a
    rank that was a commit ahead of the others first goes back, and then no store says that it holds a state."""
    places = list(dict.fromkeys((*of_any_count(folder), *also)))
    ahead, given_up = list[tuple[Path, Manifest]](), list[tuple[Path, Manifest]]()
    for place in places:
        with suppress(UsageError):  # what cannot be read is left alone
            if rank_count(place) == rank_count(folder):
                continue
            saved, _ = manifests.newest(place)
            if saved is None or saved.run != run:
                continue
            older = manifests.before(place, saved)
            if min(saved.step, saved.step if older is None else older.step) > step:
                continue
            places += [Path(other) for other in (saved.share.folders if saved.share else ()) if Path(other) not in places]
            if older is not None and saved.step > step:
                ahead.append((place, saved := older))
            given_up.append((place, saved))
    try:
        for _, saved in given_up:
            refuse_in_use(saved)
        for place, older in ahead:
            manifests.go_back(place, older)
        for place, saved in given_up:
            manifests.write(place, replace(saved, state="loading"))
    except FuyouError as error:
        say(f"note: what other numbers of ranks have saved of this run is no longer needed and could not be removed: {error}")
        return
    for place, _ in given_up:
        _remove(place, say)


def _remove(place: Path, say: Callable[[str], None]) -> None:
    store = read_store(place / manifests.NAME)
    try:
        if store.refused:
            raise FuyouError(store.refused[0])
        remove_store(store)
    except (FuyouError, OSError) as error:
        say(f"note: {place} is no longer needed and could not be removed: {error}")
        return
    with suppress(OSError):
        place.rmdir()
