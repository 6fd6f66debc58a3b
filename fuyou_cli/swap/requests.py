"""Defines the daemon's requests and results: the structs of the header as frozen data.

Offsets are bytes from the start of the arena or the store. None stands for the header's FY_NOWHERE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Self

from ..spec.model import Dtype, Rule, StateDtype
from ..spec.plan import IoPlan
from .native import DTYPES, NOWHERE, ffi, lib

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
