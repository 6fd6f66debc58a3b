"""Runs the swap daemon: threads in this process that read, write and update while the caller computes.

Every submit returns a ticket. One `wait` or `poll` reports its end, as a result or an error, and the ticket is used up. From
submit until then the request's spans belong to the daemon.

Everything read from the store is compared with the checksum of what was written there. A drive reports most of its read errors
itself. This finds the others: a bit that flipped on the way, a write that went to the wrong place or nowhere. Fetched data is
compared before anything is computed on it. An update compares after its last chunk; if that fails, its new state is not used,
and the committed state lies elsewhere.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fuyou_cli.core.errors import ModelFileError, SwapError
from fuyou_cli.core.process import SILENT, Patience
from fuyou_cli.spec.model import ITEM_SIZE, SOURCES_AT, STATE_NAMES, StateLayout
from fuyou_cli.spec.plan import Span

from .native import (
    Counters,
    DaemonOptions,
    Handle,
    Home,
    RequestEvent,
    Result,
    Segment,
    Update,
    failure_error,
    ffi,
    lib,
    native_update,
    refusal_error,
)
from .store import Arena, Store

# ---- checksums -------------------------------------------------------------------------------------------------------


_HINT = (
    "the drive, its cable or memory changed the bytes: see `dmesg` and the drive's health; `fuyou verify` "
    "checks everything that is saved"
)


@dataclass(frozen=True, slots=True)
class Move:
    """Names a span of the store that is read or written."""

    kind: Literal["read", "write"]
    span: Span
    label: int


class Written:
    """Knows the checksums of the spans in a store's files, and in its sources those of the first time they were read.

    A span is written and read as a whole: nothing is known of its parts. `name` turns a request's label into a name for error
    messages.
    """

    def __init__(self, store: Store, *, name: Callable[[int], str]) -> None:
        self._store, self._name = store, name
        self._totals: dict[Span, int] = {}
        self._under_way: dict[int, Move | Update] = {}

    def expect(self, span: Span, total: int) -> None:
        """Records the checksum of a span that somebody else wrote."""
        self._totals[span] = total

    def known(self, span: Span) -> int | None:
        """Returns the checksum of a span, or None if it is not known."""
        return self._totals.get(span)

    def check(self, span: Span, total: int, what: str) -> None:
        """Compares the checksum of a span, just read, with the one that is known. `what`: for the error. Raises SwapError, and
        ModelFileError for a file of the checkpoint."""
        self.compare(span, total, self._totals.get(span, total), what)
        if span.offset >= SOURCES_AT:  # nobody wrote it: later passes must read what the first one did
            self._totals[span] = total

    def compare(self, span: Span, total: int, wanted: int, what: str) -> None:
        """Raises as `check` does if the checksum of a span is not the one that the caller wants."""
        if total != wanted:
            message = f"reading {what}: {self._store.not_as_before(span, total=total, wanted=wanted)}"
            raise ModelFileError(message) if span.offset >= SOURCES_AT else SwapError(message, hint=_HINT)

    def begin(self, ticket: int, request: Move | Update) -> None:
        self._under_way[ticket] = request

    def fail(self, ticket: int) -> None:
        """Forgets the spans of a failed request: their content is unknown."""
        request = self._under_way.pop(ticket, None)
        for span, _ in _written_by(request) if request is not None else ():
            self._totals.pop(span, None)

    def end(self, ticket: int, result: Result) -> None:
        """Raises SwapError where the request read something else than was written there. Ignores one that never began."""
        request = self._under_way.pop(ticket, None)
        if request is None:
            return
        for what, span, total in _read_by(request, result):
            self.check(span, total, f"{what}{self._name(request.label)}")
        self._totals.update((span, getattr(result, name)) for span, name in _written_by(request))


def _read_by(request: Move | Update, result: Result) -> Iterator[tuple[str, Span, int]]:
    """Yields, for each read of a request: a name for error messages, the span and its checksum."""
    if isinstance(request, Move):
        if request.kind == "read":
            yield "", request.span, result.data_sum
        return
    sources: dict[str, tuple[int | None, int]] = {
        name: (getattr(request, name).source, size) for name, size in _state_sizes(request).items()
    }
    sources["gradients"] = (request.gradients_source, ITEM_SIZE[request.gradients_dtype] * request.params)
    for name, (source, size) in sources.items():
        if source is not None:
            yield f"{name} of ", Span(offset=source, size=size), getattr(result, f"{name}_read")


def _written_by(request: Move | Update) -> Iterator[tuple[Span, str]]:
    """Yields the spans that a request writes, and the names of their checksums in a result."""
    if isinstance(request, Move):
        if request.kind == "write":
            yield request.span, "data_sum"
        return
    targets: dict[str, tuple[int | None, int]] = {
        name: (getattr(request, name).target, size) for name, size in _state_sizes(request).items()
    }
    targets["weights"] = (request.weights_target, ITEM_SIZE[request.weights_dtype] * request.params)
    for name, (target, size) in targets.items():
        if target is not None:
            yield Span(offset=target, size=size), f"{name}_sum"


def _state_sizes(update: Update) -> dict[str, int]:
    layout = StateLayout(weights=update.weights_dtype, dtype=update.states_dtype, rule=update.rule)
    return {name: layout.size(name, update.params) for name in STATE_NAMES}


# ---- the daemon ------------------------------------------------------------------------------------------------------


__all__ = ["Counters", "DaemonOptions", "Home", "RequestEvent", "Result", "Segment", "SwapDaemon", "Update"]

_SLICE_NS = 200_000_000  # a wait returns to Python this often, so that Ctrl-C works
_NOT_YET = -errno.ETIME
_EVENTS_AT_ONCE = 512
_BACKENDS = {"auto": lib.FY_BACKEND_AUTO, "io_uring": lib.FY_BACKEND_IO_URING, "threads": lib.FY_BACKEND_THREADS}
_BACKEND_NAMES: dict[int, Literal["io_uring", "threads"]] = {
    lib.FY_BACKEND_IO_URING: "io_uring", lib.FY_BACKEND_THREADS: "threads",
}  # fmt: skip
_OPERATIONS: dict[int, Literal["read", "write", "update", "chunk"]] = {
    lib.FY_OP_READ: "read", lib.FY_OP_WRITE: "write", lib.FY_OP_UPDATE: "update", lib.FY_OP_CHUNK: "chunk",
}  # fmt: skip
_SAME_NAME = (  # in DaemonOptions and in fy_options
    "read_depth", "write_depth", "requests", "chunk_params", "block_size", "scratch_offset", "scratch_size",
)  # fmt: skip
_SUBMIT_HINTS = {
    errno.EAGAIN: "too many requests are open: wait for some, or raise DaemonOptions.requests",
    errno.EINVAL: "offsets and sizes must be multiples of the store's alignment and must not overlap the scratch memory",
    errno.ERANGE: "the request ends outside the arena or the store",
    errno.E2BIG: f"an update has at most {lib.FY_MAX_SEGMENTS} segments: join neighbours that have the same settings",
}


class SwapDaemon(Handle):
    """Moves bytes between `arena` and `store` or its sources, and runs AdamW on them. Any thread may call any method.

    `label_names` turns the labels of requests (stages) into names for error messages. Callers may fill it at any time.
    `written` compares what is read with the checksum of what was written; it needs `DaemonOptions.data_sums`.
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
        self._store = store
        self._events = ffi.new("fy_event[]", _EVENTS_AT_ONCE)
        out = ffi.new("fy_daemon **")
        code = lib.fy_daemon_start(_native_options(options), arena.handle, store.handle, out, ffi.NULL)
        if code:
            raise refusal_error("the swap daemon cannot start", code, _start_hint(code, options))
        super().__init__(out[0], lib.fy_daemon_stop, "swap daemon")
        self._arena = arena  # it and the store outlive the daemon
        self.written = Written(store, name=self._name) if options.data_sums else None

    @property
    def backend(self) -> Literal["io_uring", "threads"]:
        """Returns the name of the I/O backend in use."""
        return _BACKEND_NAMES[lib.fy_daemon_backend(self.handle)]

    @property
    def description(self) -> str:
        """Tells which features are in use, and why others are not."""
        return str(ffi.string(lib.fy_daemon_description(self.handle)).decode())

    def read(
        self, arena_offset: int, store_offset: int, size: int, *, priority: int = 0, label: int = 0, compared: bool = True
    ) -> int:
        """Starts a read of `size` bytes from the store into the arena. Returns the ticket. `compared`: with what `written`
        knows of the span."""
        out = ffi.new("fy_ticket *")
        code = lib.fy_submit_read(self.handle, arena_offset, store_offset, size, priority, label, out)
        return self._ticket(out, code, Move("read", Span(offset=store_offset, size=size), label), compared=compared)

    def write(self, arena_offset: int, store_offset: int, size: int, *, priority: int = 0, label: int = 0) -> int:
        """Starts a write of `size` bytes from the arena to the store. Returns the ticket."""
        out = ffi.new("fy_ticket *")
        code = lib.fy_submit_write(self.handle, arena_offset, store_offset, size, priority, label, out)
        return self._ticket(out, code, Move("write", Span(offset=store_offset, size=size), label))

    def update(self, update: Update) -> int:
        """Starts one AdamW step of one stage: reads its states, writes new weights and states. Returns the ticket."""
        request, segments = native_update(update)
        out = ffi.new("fy_ticket *")
        code = lib.fy_submit_update(self.handle, request, segments, out)
        return self._ticket(out, code, update)

    def wait(self, ticket: int) -> Result:
        """Waits for the result of `ticket`. Raises SwapError (OutOfSpaceError on a full disk) if it failed."""
        native, waiting = ffi.new("fy_result *"), self._patience.waiting("the store")
        while (code := lib.fy_wait(self.handle, ticket, _SLICE_NS, native)) == _NOT_YET:
            waiting.look()
        return self._result(ticket, code, native)

    def poll(self, ticket: int) -> Result | None:
        """Returns the result of `ticket`, or None if it is not done; the ticket then stays valid. Raises as `wait` does."""
        native = ffi.new("fy_result *")
        code = lib.fy_wait(self.handle, ticket, 0, native)
        return None if code == _NOT_YET else self._result(ticket, code, native)

    def counters(self) -> Counters:
        """Returns totals since the start."""
        out = ffi.new("fy_counters *")
        code = lib.fy_daemon_counters(self.handle, out)
        if code:
            raise refusal_error("the daemon's counters cannot be read", code)
        return Counters.of(out)

    def events(self) -> list[RequestEvent]:
        """Returns what finished since the last call, oldest first. `events_dropped` counts the events lost in between."""
        events: list[RequestEvent] = []
        count, dropped = ffi.new("uint32_t *"), ffi.new("uint64_t *")
        while True:
            code = lib.fy_daemon_events(self.handle, self._events, _EVENTS_AT_ONCE, count, dropped)
            if code:
                raise refusal_error("the daemon's log cannot be read", code)
            self.events_dropped += dropped[0]
            events += [_event(self._events[i]) for i in range(count[0])]
            if count[0] < _EVENTS_AT_ONCE:
                return events

    def log_chunks(self) -> None:
        """Has `events` also report each chunk of an update that is computed, for a trace."""
        code = lib.fy_daemon_log_chunks(self.handle)
        if code:
            raise refusal_error("the daemon cannot log chunks", code)

    def _name(self, label: int) -> str:
        return self.label_names.get(label, f"request labelled {label}")

    def _ticket(self, out: Any, code: int, request: Move | Update, *, compared: bool = True) -> int:
        if code:
            what = request.kind if isinstance(request, Move) else "update"
            raise refusal_error(f"the {what} of {self._name(request.label)} was refused", code, _SUBMIT_HINTS.get(-code))
        ticket = int(out[0])
        if self.written is not None and compared:
            self.written.begin(ticket, request)
        return ticket

    def _result(self, ticket: int, code: int, native: Any) -> Result:
        if code == 0:
            result = Result(*(getattr(native, name) for name in Result._fields))
            if self.written is not None:
                self.written.end(ticket, result)
            return result
        if self.written is not None:
            self.written.fail(ticket)
        if code == -errno.ENOENT and native.failure.error == 0:
            raise ValueError(f"ticket {ticket} is unknown or was already collected")
        raise failure_error(
            native.failure,
            paths=self._store.files,
            sources_from=len(self._store.paths),
            label_names=self.label_names,
            code=code,
        )


def _native_options(options: DaemonOptions) -> Any:
    native = ffi.new("fy_options *", {name: getattr(options, name) for name in _SAME_NAME})
    native.backend = _BACKENDS[options.backend]
    native.update_threads = options.update_threads if options.scratch_size else 0
    native.flags = options.data_sums * lib.FY_DAEMON_DATA_SUMS
    return native


def _event(native: Any) -> RequestEvent:
    operation, begin, end = _OPERATIONS[native.operation], native.begin_ns, native.end_ns
    return RequestEvent(operation=operation, label=native.label, begin_ns=begin, end_ns=end, bytes=native.bytes)


def _start_hint(code: int, options: DaemonOptions) -> str | None:
    if code == -errno.EINVAL:
        return f"sizes, alignment or bounds are wrong in {options}"
    if options.backend == "io_uring":
        return "io_uring may be forbidden here (containers often do): use backend `threads` or `auto`"
    return None
