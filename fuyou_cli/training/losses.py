"""The losses of all committed steps in one file beside the manifest: eight bytes a step, however many there are.

Written before the manifest that counts them, read up to that count: what a killed run left behind it is written over.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from ..core.disk import failed_writing, sync_directory
from ..core.own_files import open_own

NAME = "losses.bin"
_ITEM = struct.Struct("<d")


def write(directory: Path, losses: Sequence[float], *, first: int = 0) -> None:
    """Losses of the steps from `first` on (0 for step 1), on stable storage when this returns. Those before that the file has
    lost are not known, which is not zero."""
    path = directory / NAME
    try:
        descriptor = open_own(path, anew=False)
        try:
            held = min(first, os.fstat(descriptor).st_size // _ITEM.size)
            content = b"".join(_ITEM.pack(loss) for loss in (*[math.nan] * (first - held), *losses))
            done = 0
            while done < len(content):
                done += os.pwrite(descriptor, content[done:], held * _ITEM.size + done)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        if not held:
            sync_directory(directory)
    except OSError as error:
        raise failed_writing(path, error) from error


def check(directory: Path) -> None:
    """Raises FuyouError where something else has the file's name: found before a step is computed for nothing."""
    try:
        os.close(open_own(directory / NAME, anew=False))
    except OSError as error:
        failed = failed_writing(directory / NAME, error)
        failed.hint = failed.hint or "move it away"
        raise failed from error


def read(directory: Path, count: int) -> tuple[list[float], str]:
    """Losses of the first `count` steps, and a note where some cannot be read: those are NaN, and hinder nothing."""
    path = directory / NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may be a pipe
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(min(count * _ITEM.size, os.fstat(file.fileno()).st_size))
        problem = "" if len(content) == count * _ITEM.size else "it is too short"
    except OSError as error:
        content, problem = b"", error.strerror or "it cannot be read"
    whole = content[: len(content) // _ITEM.size * _ITEM.size]
    found = [value for (value,) in _ITEM.iter_unpack(whole)]
    note = f"{path}: {problem}; losses of earlier steps are not known" if problem and count else ""
    return found + [math.nan] * (count - len(found)), note
