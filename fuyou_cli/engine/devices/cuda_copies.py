"""What CUDA copies are made of: events, and large copies handed to the device piece by piece.

Boundaries have a stream of their own each way and go at once. Pieces of what is large go on a second one, at most `PIECE` bytes
of them at a time, in two halves, so that the copy engine has the next half when one ends: a boundary then waits for no more,
however the device chooses between its streams (their priorities say nothing about copies). A thread each way hands on the next
half when one is over, because the launching thread may stand in a wait or in a long call just then.
"""

from __future__ import annotations

import queue
import threading
from collections import deque

import torch

from .base import MOST_COPIES
from .pieces import PIECE, in_pieces

_HALVES = 2


class CudaEvent:
    """`blocking`: who waits for it sleeps, where else a core would spin."""

    def __init__(self, stream: torch.cuda.Stream, *, blocking: bool = False) -> None:
        self._event = torch.cuda.Event(enable_timing=True, blocking=blocking)
        self._event.record(stream)

    def seconds_after(self, earlier: CudaEvent) -> float:
        """Both have passed."""
        return float(earlier._event.elapsed_time(self._event)) / 1000

    def before(self, stream: torch.cuda.Stream) -> None:
        """What is submitted to the stream from now on runs after it."""
        stream.wait_event(self._event)

    def wait(self) -> None:
        self.before(torch.cuda.current_stream())

    def synchronize(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())


class BulkEvent:
    """The end of a copy in pieces. Until the last of them is with the device, only the host can wait for it."""

    def __init__(self) -> None:
        self._handed_on = threading.Event()
        self._end: CudaEvent | None = None
        self._error: RuntimeError | None = None

    def hand_on(self, end: CudaEvent | None, error: RuntimeError | None = None) -> None:
        self._end, self._error = end, error
        self._handed_on.set()

    def handed_on(self) -> CudaEvent:
        """Its last piece's event, once there is one."""
        self._handed_on.wait()
        if self._error is not None:
            raise self._error
        assert self._end is not None
        return self._end

    def wait(self) -> None:
        self.handed_on().wait()

    def synchronize(self) -> None:
        self.handed_on().synchronize()

    def done(self) -> bool:
        return self._handed_on.is_set() and self.handed_on().done()


class CudaCopies:
    """Those that a device was asked for, with when they ran: up, from, to, bytes. Threads add to them."""

    def __init__(self) -> None:
        self._copies: deque[tuple[bool, CudaEvent, CudaEvent, int]] = deque(maxlen=MOST_COPIES)

    def make(
        self, source: torch.Tensor, target: torch.Tensor, stream: torch.cuda.Stream, *, up: bool, blocking: bool = False
    ) -> CudaEvent:
        """A copy behind what is on the stream; its end."""
        begin = CudaEvent(stream)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        (target if up else source).record_stream(stream)
        end = CudaEvent(stream, blocking=blocking)
        self._copies.append((up, begin, end, source.numel() * source.element_size()))
        return end

    def take_ended(self) -> list[tuple[bool, CudaEvent, CudaEvent, int]]:
        """Those that are over, which are forgotten."""
        ended: list[tuple[bool, CudaEvent, CudaEvent, int]] = []
        for _ in range(len(self._copies)):
            copy = self._copies.popleft()
            (ended if copy[2].done() else self._copies).append(copy)
        return ended


class BulkCopies:
    """Large copies one way, in order. Both memories of a copy stay until it is over, which is not looked after here."""

    def __init__(self, device: torch.device, copies: CudaCopies, *, up: bool) -> None:
        self._device, self._copies, self._up = device, copies, up
        self.stream = torch.cuda.Stream(device)
        self._asked: queue.SimpleQueue[tuple[torch.Tensor, torch.Tensor, CudaEvent, BulkEvent] | None] = queue.SimpleQueue()
        self._newest: BulkEvent | None = None
        self._thread = threading.Thread(target=self._run, name=f"bulk-{'up' if up else 'down'}", daemon=True)
        self._thread.start()

    def submit(self, source: torch.Tensor, target: torch.Tensor, after: CudaEvent) -> BulkEvent:
        """A copy (both 1-D) that runs after `after`."""
        event = self._newest = BulkEvent()
        self._asked.put((source, target, after, event))
        return event

    def _run(self) -> None:
        under_way: deque[CudaEvent] = deque()
        while (asked := self._asked.get()) is not None:
            source, target, after, event = asked
            try:
                torch.cuda.set_device(self._device)
                after.before(self.stream)
                for piece in in_pieces(source, target, PIECE // _HALVES):
                    while len(under_way) >= _HALVES:
                        under_way.popleft().synchronize()  # sync: on this thread, which does nothing else
                    under_way.append(self._copies.make(*piece, self.stream, up=self._up, blocking=True))
                event.hand_on(under_way[-1])
            except RuntimeError as error:  # re-raised by whoever waits
                under_way.clear()
                event.hand_on(None, error)

    def hand_on(self) -> None:
        """Returns when everything asked for is with the device."""
        if self._newest is not None:
            self._newest.handed_on()

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join()
