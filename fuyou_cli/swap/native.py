"""Imports the extension module's `ffi` and `lib`, turns its error codes into errors with a remedy, owns its objects, and
defines the daemon's requests and results: the structs of the header as frozen data.

Offsets are bytes from the start of the arena or the store. None stands for the header's FY_NOWHERE.
"""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self

from fuyou_cli.core.disk import REMEDIES
from fuyou_cli.core.errors import NO_THREADS, FuyouError, ModelFileError, OutOfSpaceError, SwapError
from fuyou_cli.spec.model import Dtype, Rule, StateDtype
from fuyou_cli.spec.plan import IoPlan

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


# ---- requests and results --------------------------------------------------------------------------------------------

_OF_A_PLAN = ("backend", "read_depth", "write_depth", "update_threads", "chunk_params", "block_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonOptions:
    """Sets the sizes of the daemon. Nothing grows after the start."""

    backend: Literal["auto", "io_uring", "threads"] = "auto"
    read_depth: int = 8  # most reads in flight
    write_depth: int = 8
    update_threads: int = 1
    # Most requests that are accepted and not yet waited for: all that the library has. Of frozen experts one stage is hundreds.
    requests: int = 4096
    chunk_params: int = 1 << 18  # parameters of one update chunk; a multiple of 16384
    block_size: int = 1 << 20  # most bytes of one I/O; a multiple of 4096
    scratch_offset: int = 0  # arena span of the update chunks
    scratch_size: int = 0  # from kernels.scratch_size(); 0: no updates
    data_sums: bool = False  # reads and writes are checksummed, reads compared with what was written

    @classmethod
    def of(cls, io: IoPlan, *, data_sums: bool) -> DaemonOptions:
        """Returns the options for a run's plan."""
        same = {name: getattr(io, name) for name in _OF_A_PLAN}
        return cls(**same, scratch_offset=io.scratch.offset, scratch_size=io.scratch.size, data_sums=data_sums)


@dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    """Says where one state tensor rests: in RAM at `arena`, or on the ssd.

    On the ssd it is read from `source` (None: all zero) and written to `target`. With both `arena` and `target`, a copy is
    written too.
    """

    arena: int | None = None
    source: int | None = None
    target: int | None = None


NO_HOME = Home()


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Describes parameters [first, first + count) and the optimizer's settings for them."""

    first: int
    count: int
    weight_decay: float
    lr_scale: float = 1.0
    frozen: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """Describes one update of one stage; see fuyou.h. Parameters outside all segments keep their values."""

    params: int  # a multiple of 2048
    weights_dtype: Dtype
    gradients_dtype: Dtype
    weights: int  # arena offset: old weights on entry, new ones when the ticket completes
    weights_target: int | None = None
    gradients: int | None = None  # arena offset, or None with gradients_source
    gradients_source: int | None = None
    remainder: Home = NO_HOME
    momentum: Home = NO_HOME
    variance: Home = NO_HOME
    lr: float
    beta1: float
    beta2: float
    epsilon: float
    gradient_scale: float = 1.0
    step: int  # 1 for the first
    priority: int = 0  # lower runs first
    label: int = 0  # the stage
    seed: int = 0  # of the draws that round small states
    states_dtype: StateDtype = "float32"
    rule: Rule = "adamw"  # lion keeps no variance
    segments: Sequence[Segment] = ()


class Result(NamedTuple):
    """The results of a finished request.

    `*_sum` are checksums of the bytes written to the store, 0 where none were written. `data_sum` is the checksum of a read
    or write; it needs `data_sums`. `*_read` are those of an update's reads.
    """

    nonfinite: int
    weights_sum: int
    remainder_sum: int
    momentum_sum: int
    variance_sum: int
    data_sum: int
    remainder_read: int
    momentum_read: int
    variance_read: int
    gradients_read: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """Totals since the start. Nanoseconds are sums over threads; `*_busy_ns` is time with at least one I/O in flight."""

    read_bytes: int
    written_bytes: int
    reads: int
    writes: int
    read_busy_ns: int
    write_busy_ns: int
    update_params: int
    update_cpu_ns: int
    ring_cpu_ns: int
    short_resubmitted: int
    in_flight: int
    queued: int

    @classmethod
    def of(cls, native: Any) -> Self:
        """Copies a filled `fy_counters`."""
        return cls(**{field.name: getattr(native, field.name) for field in fields(cls)})


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestEvent:
    """The times of one finished request, or of part of an update, on the clock of `time.monotonic_ns`.

    The event of an update itself has no bytes: its I/O events have them. A chunk is a part of an update that was computed.
    """

    operation: Literal["read", "write", "update", "chunk"]
    label: int
    begin_ns: int
    end_ns: int
    bytes: int


_SAME_NAME = (  # as in fy_update
    "params", "lr", "beta1", "beta2", "epsilon", "gradient_scale", "step", "priority", "label", "seed",
)  # fmt: skip
_OFFSETS = ("weights", "weights_target", "gradients", "gradients_source")
_HOMES = ("remainder", "momentum", "variance")


def _place(offset: int | None) -> int:
    return NOWHERE if offset is None else offset


def native_update(update: Update) -> tuple[Any, Any]:
    """Returns `fy_update *` and `fy_segment *`. The second owns memory and must live until the call returns."""
    segments = ffi.new("fy_segment[]", max(1, len(update.segments)))
    for target, segment in zip(segments, update.segments, strict=False):  # an update without segments still has one spare entry
        target.first, target.count = segment.first, segment.count
        target.weight_decay, target.lr_scale = segment.weight_decay, segment.lr_scale
        target.flags = lib.FY_SEGMENT_FROZEN if segment.frozen else 0
    values: dict[str, Any] = {name: getattr(update, name) for name in _SAME_NAME}
    values |= {name: _place(getattr(update, name)) for name in _OFFSETS}
    for name in _HOMES:
        home: Home = getattr(update, name)
        values[name] = {"arena": _place(home.arena), "source": _place(home.source), "target": _place(home.target)}
    values |= {"weights_dtype": DTYPES[update.weights_dtype], "gradients_dtype": DTYPES[update.gradients_dtype]}
    states = lib.FY_INT8 if update.states_dtype == "int8" else DTYPES[update.states_dtype]
    rule = {"adamw": lib.FY_ADAMW, "lion": lib.FY_LION}[update.rule]
    values |= {"states_dtype": states, "rule": rule, "segment_count": len(update.segments)}
    return ffi.new("fy_update *", values), segments
