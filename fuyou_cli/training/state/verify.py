"""Whether the extents that a manifest names still hold what was written there: read once, summed piece by piece."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...core.errors import SwapError
from ...planner.phases import READ_BACK
from ...spec.plan import Span
from ...swap.arena import Arena
from ...swap.daemon import SwapDaemon
from ...swap.kernels import CHECKSUM_BLOCK, checksum
from ...swap.written import not_as_written
from .manifest import Manifest, StoredExtent

_TURNS = 2  # pieces: one is read while the other is summed
PIECE = READ_BACK // _TURNS  # bytes read at once
MODULUS = 1 << 64  # of sums
_READINGS = 2  # of an extent that is not as it was written, before that is believed
# The drive has lost it, or the file is shorter. Any other reason says nothing of what is there.
_LOST = {errno.EIO, errno.ENODATA, errno.EREMOTEIO, errno.EBADMSG, errno.EUCLEAN}

Progress = Callable[[int], None]  # of bytes more that are read


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """An extent whose bytes are not what was written. `why`: for people."""

    stage: str
    tensor: str
    why: str

    def __str__(self) -> str:
        return f"{self.tensor} of {self.stage}: {self.why}"


def size_of(manifest: Manifest) -> int:
    """Bytes that verifying reads."""
    return sum(extent.size for stage in manifest.stages for _, extent in stage.extents())


def damages(
    manifest: Manifest, daemon: SwapDaemon, arena: Arena, window: Span, *, progress: Progress = lambda size: None
) -> Iterator[Damage]:
    """Of every extent, in order; what a drive cannot read is damage too. `window`: a span of the arena that nobody uses
    meanwhile, two blocks of 4096 bytes at least. Raises FuyouError where reading is refused for another reason."""
    turns = _turns(window)

    def wrong(extent: StoredExtent, progress: Progress) -> str:
        try:
            total = _sum(extent, daemon, arena, turns, progress)
        except SwapError as error:
            if error.code not in _LOST:
                raise
            return error.message
        return not_as_named(manifest, extent, total) if total != extent.sum else ""

    for stage in manifest.stages:
        for name, extent in stage.extents():
            why = wrong(extent, progress)
            for _ in range(_READINGS - 1):
                why = why and wrong(extent, _unheard)
            if why:
                yield Damage(stage=stage.name, tensor=name, why=why)


def _unheard(size: int) -> None:
    """Its bytes have been counted."""


def not_as_named(manifest: Manifest, extent: StoredExtent, total: int) -> str:
    """What is wrong with an extent of this sum, for people."""
    span = Span(offset=extent.offset, size=extent.size)
    return not_as_written(manifest.files, manifest.stripe, span, total=total, wanted=extent.sum)


def _turns(window: Span) -> tuple[Span, ...]:
    size = min(PIECE, window.size // _TURNS // CHECKSUM_BLOCK * CHECKSUM_BLOCK)
    assert size > 0, window
    return tuple(Span(offset=window.offset + turn * size, size=size) for turn in range(_TURNS))


def _sum(extent: StoredExtent, daemon: SwapDaemon, arena: Arena, turns: tuple[Span, ...], progress: Progress) -> int:
    """Of what the extent holds now. A piece that cannot be read is an error once nothing is under way."""
    size, total = turns[0].size, 0
    starts = range(0, extent.size, size)
    tickets: list[int] = []

    def begin(number: int) -> None:
        if number < len(starts):
            length = min(size, extent.size - starts[number])
            tickets.append(daemon.read(turns[number % _TURNS].offset, extent.offset + starts[number], length))

    begin(0)
    for number, start in enumerate(starts):
        begin(number + 1)
        try:
            daemon.wait(tickets.pop(0))
        except SwapError:
            _settle(daemon, tickets)
            raise
        length = min(size, extent.size - start)
        total += checksum(arena.view(turns[number % _TURNS].offset, length), position=start)
        progress(length)
    return total % MODULUS


def _settle(daemon: SwapDaemon, tickets: list[int]) -> None:
    """What else is under way is over, however it ended: the first error is told."""
    for ticket in tickets:
        try:
            daemon.wait(ticket)
        except SwapError:
            continue
