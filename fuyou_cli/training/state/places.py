"""Remembers which file system each run's store was on, so that an unmounted drive is not taken for a run that never was.

Where a drive is not mounted, its mount point is an empty folder of the drive above: a new run would begin there. What is known
lies beside other things of this user that can be found out again (`core/paths.kept_folder`), not on the drive.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ...core.errors import UsageError
from ...core.json_files import find_object
from ...core.paths import kept_folder, write_own
from ...core.probe import file_system_of

_LARGEST = 1 << 16  # bytes
_MOST = 1000  # runs, the newest ones


def remember(directories: Sequence[Path], *, say: Callable[[str], None]) -> None:
    """Notes what file systems a run's folders are on now."""
    place = _file_of(directories[0])
    names = [file_system_of(directory) for directory in directories]
    known = {str(folder): [name.identity, name.told] for folder, name in zip(directories, names, strict=True)}
    new = place.with_suffix(f".{os.getpid()}")  # renamed when complete: nobody reads half of it
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_own(new, [json.dumps(known).encode()])
        new.replace(place)
    except OSError as error:
        say(f"note: cannot keep in {place} where the store is ({error.strerror}): keep its drive mounted")
        return
    with suppress(OSError):  # another run may be at the same
        used = sorted((file.lstat().st_mtime_ns, file) for file in place.parent.iterdir())
        for _, file in used[:-_MOST]:
            file.unlink(missing_ok=True)


def forget(directory: Path) -> None:
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
