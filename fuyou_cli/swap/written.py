"""What rests where on the store, by its sum: whatever is read is compared with what was written there.

A drive says of most of what it cannot read that it cannot. This finds the rest: a bit that flipped on the way, a write that
went elsewhere or nowhere. Nothing is computed on what a fetch brought before it was compared; an update compares when its last
chunk is done, and its new state is nobody's if it fails: what was committed lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..core.errors import SwapError
from ..spec.model import ITEM_SIZE
from ..spec.plan import Span
from .requests import Result, Update

_STATES = {"remainder": 2, "momentum": 4, "variance": 4}  # bytes per parameter
_HINT = (
    "the drive, its cable or memory returned other bytes than were written: see `dmesg` and the drive's health; `fuyou verify` "
    "reads all that is saved"
)


@dataclass(frozen=True, slots=True)
class Move:
    """A span of the store, read or written."""

    kind: Literal["read", "write"]
    span: Span
    label: int


@dataclass(frozen=True, slots=True)
class _Read:
    what: str  # for people
    span: Span
    total: int


class Written:
    """Of the store in these files, striped. Spans are written and read whole: nothing is known of a part of one. `name`: of a
    request's label, for people."""

    def __init__(self, files: Sequence[Path], stripe: int, *, name: Callable[[int], str]) -> None:
        self._files, self._stripe, self._name = files, stripe, name
        self._totals: dict[Span, int] = {}
        self._under_way: dict[int, Move | Update] = {}

    def expect(self, span: Span, total: int) -> None:
        """Somebody else wrote it, and knows its sum."""
        self._totals[span] = total

    def begin(self, ticket: int, request: Move | Update) -> None:
        self._under_way[ticket] = request

    def fail(self, ticket: int) -> None:
        """The request is over, and nobody knows what became of its spans."""
        request = self._under_way.pop(ticket, None)
        for span, _ in _written_by(request, None) if request is not None else ():
            self._totals.pop(span, None)

    def end(self, ticket: int, result: Result) -> None:
        """Raises SwapError where what the request read is not what was written there."""
        request = self._under_way.pop(ticket)
        for read in _read_by(request, result):
            wanted = self._totals.get(read.span, read.total)
            if read.total != wanted:
                found = not_as_written(self._files, self._stripe, read.span, total=read.total, wanted=wanted)
                raise SwapError(f"reading {read.what}{self._name(request.label)}: {found}", hint=_HINT)
        self._totals.update(_written_by(request, result))


def not_as_written(files: Sequence[Path | str], stripe: int, span: Span, *, total: int, wanted: int) -> str:
    """What is wrong with a span of this sum, for people."""
    first, last = span.offset // stripe, (span.offset + span.size - 1) // stripe
    numbers = sorted({block % len(files) for block in range(first, min(last, first + len(files)) + 1)})
    where = ", ".join(str(files[number]) for number in numbers)
    which, wrong = (
        f"bytes {span.offset} to {span.offset + span.size} of the store",
        f"sum {total:016x}, {wanted:016x} is wanted",
    )
    return f"{which}, in {where}, are not what was written there ({wrong})"


def _read_by(request: Move | Update, result: Result) -> Iterator[_Read]:
    if isinstance(request, Move) and request.kind == "read":
        yield _Read("", request.span, result.data_sum)
    if not isinstance(request, Update):
        return
    for name, item in _STATES.items():
        source = getattr(request, name).source
        if source is not None:
            span = Span(offset=source, size=request.params * item)
            yield _Read(f"{name} of ", span, getattr(result, f"{name}_read"))
    if request.gradients_source is not None:
        span = Span(offset=request.gradients_source, size=request.params * ITEM_SIZE[request.gradients_dtype])
        yield _Read("gradients of ", span, result.gradients_read)


def _written_by(request: Move | Update, result: Result | None) -> Iterator[tuple[Span, int]]:
    """Spans and their sums; 0 where there is no result."""

    def total(name: str) -> int:
        return 0 if result is None else int(getattr(result, name))

    if isinstance(request, Move) and request.kind == "write":
        yield request.span, total("data_sum")
    if not isinstance(request, Update):
        return
    for name, item in _STATES.items():
        target = getattr(request, name).target
        if target is not None:
            yield Span(offset=target, size=request.params * item), total(f"{name}_sum")
    if request.weights_target is not None:
        yield Span(offset=request.weights_target, size=request.params * ITEM_SIZE[request.weights_dtype]), total("weights_sum")
