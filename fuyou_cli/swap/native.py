"""Imports the extension module's `ffi` and `lib`, turns its error codes into errors with a remedy, and owns its objects."""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from fuyou_cli.core.disk import REMEDIES
from fuyou_cli.core.errors import NO_THREADS, FuyouError, ModelFileError, OutOfSpaceError, SwapError

try:
    _native: Any = importlib.import_module("fuyou_cli._native")
except ImportError as error:
    raise FuyouError(
        f"the native extension of fuyou cannot be loaded: {error}",
        hint="install the package with `pip install .`; in a checkout, `scripts/build-native` builds it in place",
    ) from error

ffi: Final[Any] = _native.ffi
lib: Final[Any] = _native.lib

NOWHERE: Final[int] = lib.FY_NOWHERE
DTYPES: Final[dict[str, int]] = {"float32": lib.FY_FLOAT32, "bfloat16": lib.FY_BFLOAT16}


# ---- errors ----------------------------------------------------------------------------------------------------------


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
    errno.ECANCELED: "the daemon stopped before it finished this request",
    errno.ELOOP: "the store's file must not be a symbolic link: remove the link, or point offload.dir at its target",
}
_OPENING_HINTS = {
    errno.EPERM: "the file belongs to another user: give this run an offload.dir of your own",
    errno.EINVAL: "that path is not a regular file: move it away, or give this run its own offload.dir",
}


_ALLOCATING_HINTS = {
    errno.EPERM: "the file may not be made longer: `lsattr` shows whether it is immutable or append-only (`chattr -i -a` ends "
    "that); or name another folder in offload.dir"
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


# ---- objects of the library ------------------------------------------------------------------------------------------


class Handle:
    """Owns one object of the library, named `what` in errors. A `with` block closes it."""

    def __init__(self, native: Any, close: Callable[[Any], int], what: str, *, hint: str | None = None) -> None:
        self._native, self._close, self._what, self._hint = native, close, what, hint

    @property
    def handle(self) -> Any:
        """Returns the library's object. Raises ValueError once it is closed."""
        if self._native is None:
            raise ValueError(f"the {self._what} is closed")
        return self._native

    def close(self) -> None:
        """Closes it. A second call does nothing. Raises SwapError where the library refuses."""
        if self._native is None:
            return
        native, self._native = self._native, None  # first: other threads find it closed
        code = self._close(native)
        if code:
            self._native = native
            raise refusal_error(f"the {self._what} cannot be closed", code, self._hint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
