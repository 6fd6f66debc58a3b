"""Keeps the losses of all committed steps in one file beside the manifest, eight bytes per step.

The file is written before the manifest that counts its losses, and read up to that count. The next run overwrites what a killed
run left behind it.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from ..core.disk import failed_writing, sync_directory
from ..core.paths import open_own

NAME = "losses.bin"
_ITEM = struct.Struct("<d")


def write(directory: Path, losses: Sequence[float], *, first: int = 0) -> None:
    """Writes the losses of the steps from `first` on (0 for step 1) to stable storage. Earlier losses that are lost become
    NaN."""
    path = directory / NAME
    try:
        with os.fdopen(open_own(path, anew=False), "wb") as file:
            held = min(first, os.fstat(file.fileno()).st_size // _ITEM.size)
            file.seek(held * _ITEM.size)
            file.writelines(_ITEM.pack(loss) for loss in (*[math.nan] * (first - held), *losses))
            file.flush()
            os.fdatasync(file.fileno())
        if not held:
            sync_directory(directory)
    except OSError as error:
        raise failed_writing(path, error) from error


def read(directory: Path, count: int) -> tuple[list[float], str]:
    """Returns the losses of the first `count` steps, with NaN for those that cannot be read, and a note that says so."""
    path = directory / NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # the file may be a pipe
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(min(count * _ITEM.size, os.fstat(file.fileno()).st_size))
        problem = "" if len(content) == count * _ITEM.size else "it is too short"
    except OSError as error:
        content, problem = b"", error.strerror or "it cannot be read"
    items = content[: len(content) // _ITEM.size * _ITEM.size]
    losses = [value for (value,) in _ITEM.iter_unpack(items)]
    note = f"{path}: {problem}; the losses of earlier steps are not known" if problem and count else ""
    return losses + [math.nan] * (count - len(losses)), note
