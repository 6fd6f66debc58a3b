"""The swap daemon: threads in this process that read, write and update while somebody else computes.

Every submit returns a ticket; a ticket is spent by the one `wait` or `poll` that reports its end, be it a result or an
error. From submit until then the spans of the request belong to the daemon.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

from ..core.patience import SILENT, Patience
from ..spec.plan import Span
from .arena import Arena
from .failures import failure_error, refusal_error
from .native import ffi, lib
from .requests import (
    Counters,
    DaemonOptions,
    Event,
    Home,
    Result,
    Segment,
    Update,
    counters_of,
    native_update,
    result_of,
)
from .store import Store
from .written import Move, Written

__all__ = ["Counters", "DaemonOptions", "Event", "Home", "Result", "Segment", "SwapDaemon", "Update"]

_SLICE_NS = 200_000_000  # a wait comes back to Python this often, so that Ctrl-C works
_NOT_YET = -errno.ETIME
_EVENTS_AT_ONCE = 512
_BACKENDS = {"auto": lib.FY_BACKEND_AUTO, "io_uring": lib.FY_BACKEND_IO_URING, "threads": lib.FY_BACKEND_THREADS}
_BACKEND_NAMES: dict[int, Literal["io_uring", "threads"]] = {
    lib.FY_BACKEND_IO_URING: "io_uring",
    lib.FY_BACKEND_THREADS: "threads",
}
_OPERATIONS: dict[int, Literal["read", "write", "update"]] = {
    lib.FY_OP_READ: "read",
    lib.FY_OP_WRITE: "write",
    lib.FY_OP_UPDATE: "update",
}
_SUBMIT_HINTS = {
    errno.EAGAIN: "more requests are waiting to be collected than DaemonOptions.requests allows",
    errno.EINVAL: "offsets and sizes must be multiples of the store's alignment and keep clear of the scratch",
    errno.ERANGE: "the request reaches beyond the arena or the store",
    errno.E2BIG: f"an update has at most {lib.FY_MAX_SEGMENTS} segments: join neighbours with the same settings",
}


class SwapDaemon:
    """Moves bytes between `arena` and `store` and runs AdamW over them. Any thread may call any method.

    `label_names` turns the labels of requests (stages) into names for error messages; callers may fill it at any time.
    `written`, with `DaemonOptions.data_sums`: what is read is compared with it.
    """

    def __init__(
        self,
        arena: Arena,
        store: Store,
        options: DaemonOptions,
        *,
        label_names: Mapping[int, str] | None = None,
        patience: Patience = SILENT,
    ) -> None:
        self._patience = patience
        self.label_names: dict[int, str] = dict(label_names or {})
        self.events_dropped = 0
        self._paths = store.paths
        self._events = ffi.new("fy_event[]", _EVENTS_AT_ONCE)
        out = ffi.new("fy_daemon **")
        why = ffi.new("fy_failure *")
        native_options = ffi.new(
            "fy_options *",
            {
                "backend": _BACKENDS[options.backend],
                "read_depth": options.read_depth,
                "write_depth": options.write_depth,
                "update_threads": options.update_threads if options.scratch_size else 0,
                "requests": options.requests,
                "chunk_params": options.chunk_params,
                "block_size": options.block_size,
                "scratch_offset": options.scratch_offset,
                "scratch_size": options.scratch_size,
                "flags": _flags(options),
            },
        )
        code = lib.fy_daemon_start(native_options, arena.handle, store.handle, out, why)
        if code:
            raise refusal_error("the swap daemon cannot start", code, _start_hint(code, options))
        self._handle: Any = out[0]
        self._owners = (arena, store)  # both outlive the daemon
        self.written = Written(store.paths, store.stripe, name=self._name) if options.data_sums else None

    @property
    def backend(self) -> Literal["io_uring", "threads"]:
        """The I/O backend in use."""
        return _BACKEND_NAMES[lib.fy_daemon_backend(self._live())]

    @property
    def description(self) -> str:
        """Features in use, and why others are not."""
        return str(ffi.string(lib.fy_daemon_description(self._live())).decode())

    def read(self, arena_offset: int, store_offset: int, size: int, *, priority: int = 0, label: int = 0) -> int:
        """Starts reading `size` bytes of the store into the arena; the ticket."""
        out = ffi.new("fy_ticket *")
        code = lib.fy_submit_read(self._live(), arena_offset, store_offset, size, priority, label, out)
        return self._ticket(out, code, Move("read", Span(offset=store_offset, size=size), label))

    def write(self, arena_offset: int, store_offset: int, size: int, *, priority: int = 0, label: int = 0) -> int:
        """Starts writing `size` bytes of the arena to the store; the ticket."""
        out = ffi.new("fy_ticket *")
        code = lib.fy_submit_write(self._live(), arena_offset, store_offset, size, priority, label, out)
        return self._ticket(out, code, Move("write", Span(offset=store_offset, size=size), label))

    def update(self, update: Update) -> int:
        """Starts one AdamW step over one stage: states in, new weights and states out; the ticket."""
        request, segments = native_update(update)
        out = ffi.new("fy_ticket *")
        code = lib.fy_submit_update(self._live(), request, segments, out)
        return self._ticket(out, code, update)

    def wait(self, ticket: int) -> Result:
        """The result of `ticket`, when it has one. Raises SwapError (OutOfSpaceError on a full disk) if it failed."""
        native, waiting = ffi.new("fy_result *"), self._patience.waiting("the store")
        while (code := lib.fy_wait(self._live(), ticket, _SLICE_NS, native)) == _NOT_YET:
            waiting.look()
        return self._result(ticket, code, native)

    def poll(self, ticket: int) -> Result | None:
        """The result of `ticket` if it has one now, else None: the ticket stays valid. Raises as `wait` does."""
        native = ffi.new("fy_result *")
        code = lib.fy_wait(self._live(), ticket, 0, native)
        return None if code == _NOT_YET else self._result(ticket, code, native)

    def counters(self) -> Counters:
        """Totals since start."""
        out = ffi.new("fy_counters *")
        code = lib.fy_daemon_counters(self._live(), out)
        if code:
            raise refusal_error("the daemon's counters cannot be read", code)
        return counters_of(out)

    def events(self) -> list[Event]:
        """What has finished since the last call, oldest first. `events_dropped` counts what was lost in between."""
        events: list[Event] = []
        count, dropped = ffi.new("uint32_t *"), ffi.new("uint64_t *")
        while True:
            code = lib.fy_daemon_events(self._live(), self._events, _EVENTS_AT_ONCE, count, dropped)
            if code:
                raise refusal_error("the daemon's log cannot be read", code)
            self.events_dropped += dropped[0]
            events += [_event(self._events[i]) for i in range(count[0])]
            if count[0] < _EVENTS_AT_ONCE:
                return events

    def close(self) -> None:
        """Drains the kernel and ends the threads; tickets not yet done fail with ECANCELED. Twice is fine."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        code = lib.fy_daemon_stop(handle)
        if code:
            raise refusal_error("the swap daemon did not stop cleanly", code)

    def __enter__(self) -> SwapDaemon:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _live(self) -> Any:
        if self._handle is None:
            raise ValueError("the swap daemon is stopped")
        return self._handle

    def _name(self, label: int) -> str:
        return self.label_names.get(label, f"request labelled {label}")

    def _ticket(self, out: Any, code: int, request: Move | Update) -> int:
        if code:
            what = request.kind if isinstance(request, Move) else "update"
            raise refusal_error(f"the {what} of {self._name(request.label)} was refused", code, _SUBMIT_HINTS.get(-code))
        ticket = int(out[0])
        if self.written is not None:
            self.written.begin(ticket, request)
        return ticket

    def _result(self, ticket: int, code: int, native: Any) -> Result:
        if code == 0:
            result = result_of(native)
            if self.written is not None:
                self.written.end(ticket, result)
            return result
        if self.written is not None:
            self.written.fail(ticket)
        if code == -errno.ENOENT and native.failure.error == 0:
            raise ValueError(f"ticket {ticket} is unknown or was already collected")
        raise failure_error(native.failure, paths=self._paths, label_names=self.label_names, code=code)


def _flags(options: DaemonOptions) -> int:
    sums = lib.FY_DAEMON_DATA_SUMS if options.data_sums else 0
    return int(sums | (lib.FY_DAEMON_WRITE_SUMS if options.write_sums else 0))


def _event(native: Any) -> Event:
    return Event(
        operation=_OPERATIONS[native.operation],
        label=native.label,
        begin_ns=native.begin_ns,
        end_ns=native.end_ns,
        bytes=native.bytes,
    )


def _start_hint(code: int, options: DaemonOptions) -> str | None:
    if code == -errno.EINVAL:
        return f"sizes, alignment or bounds are wrong in {options}"
    if options.backend == "io_uring":
        return "io_uring may be forbidden here (containers often do): use backend `threads` or `auto`"
    return None
