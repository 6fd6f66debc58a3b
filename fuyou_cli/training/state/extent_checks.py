"""Checks that the extents that a manifest names still hold what was written. Reads and sums them piece by piece."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from ...core.errors import SwapError
from ...planner.memory import READ_BACK
from ...spec.plan import Span
from ...swap.daemon import SwapDaemon
from ...swap.kernels import CHECKSUM_BLOCK, checksum
from ...swap.store import Arena, not_as_written
from .stored import Manifest, StoredExtent

_TURNS = 2  # pieces; one is read while the other is summed
PIECE = READ_BACK // _TURNS  # bytes read at once
MODULUS = 1 << 64  # of checksums
# The drive has lost the data, or the file is shorter. Other errors say nothing about the data.
LOST = {errno.EIO, errno.ENODATA, errno.EREMOTEIO, errno.EBADMSG, errno.EUCLEAN}

Progress = Callable[[int], None]  # gets the number of bytes just read


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """Names an extent whose bytes are not what was written. `why` is for the user. `unreadable`: they may be, but the drive
    does not give them."""

    stage: str
    tensor: str
    why: str
    unreadable: bool

    def __str__(self) -> str:
        return f"{self.tensor} of {self.stage}: {self.why}"


def size_of(manifest: Manifest) -> int:
    """Returns the bytes that verifying reads."""
    return sum(extent.size for stage in manifest.stages for _, extent in stage.extents())


def damages(
    manifest: Manifest, daemon: SwapDaemon, arena: Arena, window: Span, *, progress: Progress = lambda size: None
) -> Iterator[Damage]:
    """Yields every damaged extent, in order. Data that a drive cannot read is damage too. Raises other read errors.

    `window`: a span of the arena that nobody else uses meanwhile, at least two blocks of 4096 bytes.
    """

    def wrong(extent: StoredExtent) -> tuple[str, bool] | None:
        try:
            total = checksum_of(extent, daemon, arena, window)
        except SwapError as error:
            if error.code not in LOST:
                raise
            return error.message, True
        return (not_as_named(manifest, extent, total), False) if total != extent.sum else None

    for stage in manifest.stages:
        for name, extent in stage.extents():
            found = wrong(extent) and wrong(extent)  # damage must show in two reads
            progress(extent.size)
            if found:
                yield Damage(stage=stage.name, tensor=name, why=found[0], unreadable=found[1])


def not_as_named(manifest: Manifest, extent: StoredExtent, total: int) -> str:
    """Says what is wrong with an extent that has this checksum."""
    span = Span(offset=extent.offset, size=extent.size)
    return not_as_written(manifest.files, manifest.stripe, span, total=total, wanted=extent.sum)


def _turns(window: Span) -> tuple[Span, ...]:
    size = min(PIECE, window.size // _TURNS // CHECKSUM_BLOCK * CHECKSUM_BLOCK)
    assert size > 0, window
    return tuple(Span(offset=window.offset + turn * size, size=size) for turn in range(_TURNS))


def checksum_of(extent: StoredExtent, daemon: SwapDaemon, arena: Arena, window: Span) -> int:
    """Returns the checksum of what the extent holds now. If it cannot be read, raises only after all reads have ended.
    `window`: as for `damages`."""
    turns = _turns(window)
    under_way: list[tuple[int, int, int, int]] = []  # ticket, place in the arena, size, position
    total = 0

    def sum_one() -> int:
        ticket, place, size, position = under_way.pop(0)
        daemon.wait(ticket)
        return checksum(arena.view(place, size), position=position)

    try:
        for number, position in enumerate(range(0, extent.size, turns[0].size)):
            place, size = turns[number % _TURNS].offset, min(turns[0].size, extent.size - position)
            if len(under_way) == _TURNS:
                total += sum_one()
            under_way.append((daemon.read(place, extent.offset + position, size), place, size, position))
        while under_way:
            total += sum_one()
    except SwapError:
        for ticket, *_ in under_way:
            with suppress(SwapError):  # the first error is raised
                daemon.wait(ticket)
        raise
    return total % MODULUS
