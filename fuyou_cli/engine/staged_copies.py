"""Copies tensors that rest on a device to the store and back, through a few small slots of the arena.

On the way to the store, a piece is copied to a slot, then written and checksummed at once; another thread computes the
checksum. Meanwhile the other slots are at other stages of this. Only a caller that asks for the end (`finish`) waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ..planner.residency import UPDATE_PRIORITY
from ..spec.plan import Span, StateTensor
from ..swap.daemon import SwapDaemon
from ..swap.kernels import checksum
from .devices.base import Device, Event
from .host_memory import HostMemory

MODULUS = 1 << 64  # checksums of parts are added modulo this
_PAUSE = 1e-3  # seconds between two polls of a waiting caller

Extents = Mapping[StateTensor, tuple[torch.Tensor, Span]]  # bytes on the device, and their place on the store


@dataclass(slots=True, eq=False)
class _Piece:
    """Describes a part of an extent on its way to the store. A piece equals only itself: tensors have no equality."""

    name: StateTensor
    source: torch.Tensor
    target: int  # offset in the store
    position: int  # offset in the extent
    slot: Span
    arrived: Event
    total: Future[int] | None = None
    write: int | None = None


class StagedCopies:
    """Holds the slots that the copies under way share. `daemon` reads and writes."""

    def __init__(self, *, slots: tuple[Span, ...], daemon: SwapDaemon, memory: HostMemory, device: Device) -> None:
        self.daemon, self.memory, self.device = daemon, memory, device
        self.free = list(slots)
        self.piece = slots[0].size if slots else 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="staged-sums")

    def begin(self, stage: int, extents: Extents) -> StageCopy:
        """Begins to copy tensors of a stage, as compute submitted so far leaves them, to their extents."""
        return StageCopy(self, stage, extents)

    def sum(self, span: Span, position: int) -> Future[int]:
        """Computes the checksum of what a slot holds, `position` bytes into an extent, on another thread."""
        return self._thread.submit(lambda: checksum(self.memory.arena.view(span.offset, span.size), position=position))

    def fetch(self, stage: int, target: torch.Tensor, extent: Span) -> int:
        """Copies an extent to the device (1-D, bytes). Returns its checksum when it is there."""
        slot, total = self.free[0], 0
        for begin in range(0, extent.size, self.piece):
            part = Span(offset=slot.offset, size=min(self.piece, extent.size - begin))
            self.daemon.wait(self.daemon.read(part.offset, extent.offset + begin, part.size, label=stage))
            total += checksum(self.memory.arena.view(part.offset, part.size), position=begin)
            self.put(part, target[begin : begin + part.size])
        return total % MODULUS

    def put(self, slot: Span, target: torch.Tensor) -> None:
        """Copies what a slot holds to the device. Returns when it is there."""
        self.device.upload(self.memory.tensor(slot, torch.uint8), target).synchronize()

    def close(self) -> None:
        """Ends the thread. Gives up what is under way."""
        self._thread.shutdown()


class StageCopy:
    """Copies one stage's tensors to the store."""

    def __init__(self, copies: StagedCopies, stage: int, extents: Extents) -> None:
        self._copies, self._stage = copies, stage
        self._left = self._cut(extents)
        self._next = next(self._left, None)
        self._under_way: deque[_Piece] = deque()
        self._sums: dict[StateTensor, int] = dict.fromkeys(extents, 0)

    def _cut(self, extents: Extents) -> Iterator[tuple[StateTensor, torch.Tensor, int, int]]:
        for name, (tensor, extent) in extents.items():
            for begin in range(0, extent.size, self._copies.piece):
                yield name, tensor[begin : begin + self._copies.piece], extent.offset + begin, begin

    def advance(self) -> dict[StateTensor, int] | None:
        """Moves what can move. Returns the checksum of every extent once all are written, None before. Never waits."""
        for piece in list(self._under_way):
            if self._is_over(piece):
                self._under_way.remove(piece)
        while self._next is not None and self._copies.free:
            self._begin(*self._next)
            self._next = next(self._left, None)
        return None if self._next is not None or self._under_way else self._sums

    def finish(self, wait: Callable[[float], None]) -> dict[StateTensor, int]:
        """Returns the checksums when all is written. `wait`: sleeps for this many seconds."""
        while (sums := self.advance()) is None:
            wait(_PAUSE)
        return sums

    def _begin(self, name: StateTensor, source: torch.Tensor, target: int, position: int) -> None:
        copies = self._copies
        whole = copies.free.pop()
        slot = Span(offset=whole.offset, size=source.numel())
        arrived = copies.device.download(source, copies.memory.tensor(slot, torch.uint8))
        self._under_way.append(_Piece(name, source, target, position, slot, arrived))

    def _is_over(self, piece: _Piece) -> bool:
        copies = self._copies
        if piece.total is None:
            if not piece.arrived.done():
                return False
            piece.arrived.synchronize()  # raises the copy's error
            piece.total = copies.sum(piece.slot, piece.position)
            piece.write = copies.daemon.write(
                piece.slot.offset, piece.target, piece.slot.size, priority=UPDATE_PRIORITY + self._stage, label=self._stage
            )
        if piece.write is not None and copies.daemon.poll(piece.write) is not None:
            piece.write = None
        if piece.write is not None or not piece.total.done():
            return False
        self._sums[piece.name] = (self._sums[piece.name] + piece.total.result()) % MODULUS
        copies.free.append(Span(offset=piece.slot.offset, size=copies.piece))
        return True
