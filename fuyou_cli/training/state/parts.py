"""Knows the files in a store's folder. Its part file tells which run the folder belongs to."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath

from ...checkpoint.files import TEMPLATE_FOLDER
from ...core.disk import failed_writing, file_size, sync_directory, sync_names_above, unreadable
from ...core.errors import UsageError
from ...core.json_files import find_object, from_json
from ...core.paths import write_own
from .. import losses
from . import manifest as manifests
from .kept_companions import is_kept
from .stored import Manifest

STORE_FILE = "store.bin"
SPARE = "spare"  # beside the first store file: reserved disk, so that the last manifest can be written on a full disk
PART_FILE = "part.json"
NEW_PART = ".part.new"  # a fixed name, so that the next run overwrites what a killed run left
_FILES = frozenset((STORE_FILE, SPARE, PART_FILE, NEW_PART, losses.NAME, *manifests.BESIDE))
_LARGEST = 1 << 16  # bytes
_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Describes one folder of a store: part `index` of `count` of the run `run`, whose manifest is in `first`."""

    run: str
    index: int
    count: int
    first: str


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


def lacking(manifest: Manifest) -> str:
    """Names the first file of the store that is missing or too short. Empty if all are complete. Raises UnreadableError where
    a drive or a permission hides one."""
    for index, name in enumerate(manifest.files):
        least = part_size(manifest.store_size, stripe=manifest.stripe, count=len(manifest.files), index=index)
        size = file_size(name)
        if size is None or size < least:
            what = "is missing" if size is None else f"has {size:,} bytes, but needs at least {least:,}"
            return f"{name} {what}"
    return ""


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
    part = Part(run=run, index=index, count=len(directories), first=str(directories[0]))
    write_own(directory / NEW_PART, [json.dumps({"fuyou_part": _VERSION, **asdict(part)}).encode(), b"\n"])
    (directory / NEW_PART).replace(directory / PART_FILE)
    sync_directory(directory)
    sync_names_above(directory)


def begin_parts(run: str, directories: Sequence[Path]) -> list[Path]:
    """Makes the store's files that are missing, empty, and says beside each whose it is. Returns those that it made.

    A run may be killed before its first manifest. Then a file that has its size would pass for somebody's data where a file
    system does not tell room from data; an empty one does not, and one with a part file of a run without a manifest neither.
    """
    made = []
    for index, directory in enumerate(directories):
        path = directory / STORE_FILE
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise failed_writing(path, error) from error
        made.append(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody else writes the part file meanwhile
            _write_part(run, directories, index)
        except BlockingIOError:  # somebody was quicker, and has it: opening the store says so
            made.remove(path)
        except OSError as error:
            discard(made)
            raise failed_writing(directory / PART_FILE, error) from error
        finally:
            os.close(descriptor)
    return made


def discard(made: Sequence[Path]) -> None:
    """Removes store files that `begin_parts` made, with their part files."""
    for path in made:
        path.unlink(missing_ok=True)
        path.with_name(PART_FILE).unlink(missing_ok=True)


def read_part(directory: Path) -> Part | None:
    """Returns the part that `directory` is, or None if there is no part file or it is not valid. Raises UnreadableError where
    it cannot be read now."""
    path = directory / PART_FILE
    try:
        content = find_object(path, limit=_LARGEST, names=True)
        if content is None or content.pop("fuyou_part", None) != _VERSION:
            return None
        part = from_json(Part, content)
    except UsageError as error:
        cause = error.__context__
        if isinstance(cause, OSError) and cause.errno not in manifests.NO_FILE:
            raise unreadable(path, cause) from None
        return None
    return part if part.index < part.count and is_plain(part.first) else None
