"""Turns the library's error codes into errors with a remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.disk import REMEDIES
from ..core.errors import NO_THREADS, FuyouError, ModelFileError, OutOfSpaceError, SwapError
from .native import lib

_DOING = {
    lib.FY_OP_OPEN: "opening",
    lib.FY_OP_READ: "reading",
    lib.FY_OP_WRITE: "writing",
    lib.FY_OP_SYNC: "syncing",
    lib.FY_OP_UPDATE: "updating",
    lib.FY_OP_ALLOCATE: "allocating",
    lib.FY_OP_SETUP: "setting up",
}
_ON_FILES = {lib.FY_OP_OPEN, lib.FY_OP_READ, lib.FY_OP_WRITE, lib.FY_OP_SYNC, lib.FY_OP_ALLOCATE}
_HINTS = REMEDIES | {
    errno.ENOSPC: "free space on that disk, or point offload.dir at a larger one",
    errno.EDQUOT: f"{REMEDIES[errno.EDQUOT]}, or point offload.dir elsewhere",
    errno.ENODATA: "the file is too short: it was cut off, or its copy is incomplete",
    errno.EBUSY: "another process uses these files: stop it, or give this run its own offload.dir",
    errno.EPERM: "only the process that opened arena, store and daemon may use them, not its forked children",
    errno.ENOENT: "check that the directory exists and is mounted",
    errno.ESTALE: "the file was moved or removed, or its drive was unmounted, while the run used it: put it back; the "
    "last commit is still in it",
    errno.ENOMEM: "not enough memory, or a locked-memory limit (`ulimit -l`) that is too small",
    errno.EMFILE: "too many open files: raise `ulimit -n`",
    errno.ECANCELED: "the daemon stopped before it finished this request",
    errno.ELOOP: "the store's file must not be a symbolic link: remove the link, or point offload.dir at its target",
}
_OPENING_HINTS = {
    errno.EPERM: "the file belongs to another user: give this run an offload.dir of your own",
    errno.EINVAL: "that path is not a regular file: move it away, or give this run its own offload.dir",
}


_ALLOCATING_HINTS = {
    errno.EPERM: "the file may not be made longer: `lsattr` shows whether it is immutable or append-only (`chattr -i -a` ends "
    "that); or name another folder in offload.dir",
}
_SETUP_HINTS = {errno.EAGAIN: NO_THREADS}
_BY_OPERATION = {lib.FY_OP_OPEN: _OPENING_HINTS, lib.FY_OP_ALLOCATE: _ALLOCATING_HINTS, lib.FY_OP_SETUP: _SETUP_HINTS}


def errno_text(code: int) -> str:
    """Names an errno, positive or negative: `Input/output error (EIO)`."""
    code = abs(code)
    return f"{os.strerror(code)} ({errno.errorcode.get(code, code)})"


def failure_error(
    why: Any,
    *,
    paths: Sequence[Path],
    sources_from: int | None = None,
    label_names: Mapping[int, str] | None = None,
    code: int | None = None,
) -> FuyouError:
    """Makes the error for a filled `fy_failure`. `code` is used where the library refused before it could fill one.
    `sources_from`: the index of the first path that is a checkpoint's file; None: none is."""
    error = abs(why.error or code or 0)
    text = _DOING.get(why.operation, "using the store")
    known = (label_names or {}).get(why.label) or (f"request labelled {why.label}" if why.label else None)
    if known and why.operation in (lib.FY_OP_READ, lib.FY_OP_WRITE, lib.FY_OP_UPDATE):
        text += f" {known}"
    text += " failed"
    if why.operation in _ON_FILES and why.file < len(paths):
        text += f": {paths[why.file]}"
        if why.operation in (lib.FY_OP_READ, lib.FY_OP_WRITE, lib.FY_OP_ALLOCATE):
            text += f" at byte {why.file_offset}: wanted {why.wanted} bytes, got {why.got}"
    if sources_from is not None and why.operation in _ON_FILES and sources_from <= why.file < len(paths):
        return _of_source(text, error)
    text += f": {errno_text(error)}"
    hints = {**_HINTS, **_BY_OPERATION.get(why.operation, {})}
    if error in (errno.ENOSPC, errno.EDQUOT):
        return OutOfSpaceError(text, hint=hints.get(error))
    return SwapError(text, hint=hints.get(error), code=error)


def _of_source(text: str, error: int) -> FuyouError:
    """Makes the error for a file of the checkpoint that frozen weights are read from."""
    changed = error in (errno.ESTALE, errno.ENOENT, errno.ENODATA, errno.ENOTDIR)
    if changed:
        return ModelFileError(f"{text}: the model's file has changed, or is gone, since the run began")
    return SwapError(f"{text}: {errno_text(error)}", hint=_HINTS.get(error), code=error)


def refusal_error(what: str, code: int, hint: str | None = None) -> SwapError:
    """Makes the error for a call that was refused before it did anything."""
    return SwapError(f"{what}: {errno_text(code)}", hint=hint or (_HINTS | _SETUP_HINTS).get(abs(code)))
