"""Compares everything read from the store with the checksum of what was written there.

A drive reports most of its read errors itself. This finds the others: a bit that flipped on the way, a write that went to the
wrong place or nowhere. Fetched data is compared before anything is computed on it. An update compares after its last chunk; if
that fails, its new state is not used, and the committed state lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from ..core.errors import ModelFileError, SwapError
from ..spec.model import ITEM_SIZE, SOURCES_AT, STATE_NAMES, StateLayout
from ..spec.plan import Span
from .requests import Result, Update
from .store import Store

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
            found = f"reading {what}: {self._store.not_as_before(span, total=total, wanted=wanted)}"
            raise ModelFileError(found) if span.offset >= SOURCES_AT else SwapError(found, hint=_HINT)

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
