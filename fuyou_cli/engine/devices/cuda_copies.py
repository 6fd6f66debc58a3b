"""Makes CUDA copies: events, and large copies handed to the device piece by piece.

Boundaries have their own stream each way and go at once. Pieces of large copies go on a second stream, at most `PIECE` bytes of
them at a time, in two halves, so that the copy engine has the next half when one ends. A boundary then waits for no more than
that, however the device chooses between its streams (their priorities do not affect copies). A thread for each direction hands
over the next half when one ends, because the launching thread may be waiting or in a long call just then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from .base import MOST_COPIES, PIECE, Event, in_pieces

_HALVES = 2


class CudaEvent(Event):
    """Wraps an event. `blocking`: the waiting thread sleeps; otherwise it keeps a core busy."""

    def __init__(self, stream: torch.cuda.Stream, *, blocking: bool = False) -> None:
        self._event = torch.cuda.Event(enable_timing=True, blocking=blocking)
        self._event.record(stream)

    def seconds_after(self, earlier: CudaEvent) -> float:
        """Returns the seconds after another event. Both must have passed."""
        return float(earlier._event.elapsed_time(self._event)) / 1000

    def before(self, stream: torch.cuda.Stream) -> None:
        """Makes work submitted to the stream from now on run after this event."""
        stream.wait_event(self._event)

    def wait(self) -> None:
        self.before(torch.cuda.current_stream())

    def synchronize(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())


Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # sources and targets


def start_copies(pairs: Pairs, stream: torch.cuda.Stream, *, up: bool, blocking: bool) -> CudaEvent:
    """Hands copies to the device, after what is on the stream. Returns the end of the last."""
    with torch.cuda.stream(stream):
        for source, target in pairs:
            target.copy_(source, non_blocking=True)
    for source, target in pairs:
        (target if up else source).record_stream(stream)
    return CudaEvent(stream, blocking=blocking)


class BulkEvent(Event):
    """Marks the end of a copy in pieces. Until its last piece is handed to the device, only the host can wait for it."""

    def __init__(self, handed_on: Future[CudaEvent]) -> None:
        self._handed_on = handed_on

    def handed_on(self) -> CudaEvent:
        """Returns the last piece's event as soon as there is one. Raises the error of the thread that hands on."""
        return self._handed_on.result()

    def wait(self) -> None:
        self.handed_on().wait()

    def synchronize(self) -> None:
        self.handed_on().synchronize()

    def done(self) -> bool:
        return self._handed_on.done() and self.handed_on().done()


class CudaCopies:
    """Holds the copies that a device was asked for, with when they ran: up, from, to, bytes. Threads add to them. A large copy
    counts as one, whatever its pieces: to ask when a copy ran costs the launching thread time at the end of each step."""

    def __init__(self) -> None:
        self._copies: deque[tuple[bool, CudaEvent, CudaEvent, int]] = deque(maxlen=MOST_COPIES)

    def make(self, pairs: Pairs, stream: torch.cuda.Stream, *, up: bool, blocking: bool = False) -> CudaEvent:
        """Makes copies after what is on the stream, and adds them as one. Returns their end."""
        begin = CudaEvent(stream)
        end = start_copies(pairs, stream, up=up, blocking=blocking)
        self.add(begin, end, sum(source.numel() * source.element_size() for source, _ in pairs), up=up)
        return end

    def add(self, begin: CudaEvent, end: CudaEvent, size: int, *, up: bool) -> None:
        """Adds a copy that the device has been handed all of."""
        self._copies.append((up, begin, end, size))

    def take_ended(self) -> list[tuple[bool, CudaEvent, CudaEvent, int]]:
        """Returns the copies that have ended, and forgets them."""
        ended: list[tuple[bool, CudaEvent, CudaEvent, int]] = []
        for _ in range(len(self._copies)):
            copy = self._copies.popleft()
            (ended if copy[2].done() else self._copies).append(copy)
        return ended


class BulkCopies:
    """Makes large copies one way, in order. Both memories of a copy must stay valid until it has ended; this class does not
    check it."""

    def __init__(self, device: torch.device, copies: CudaCopies, *, up: bool) -> None:
        self._device, self._copies, self._up = device, copies, up
        self.stream = torch.cuda.Stream(device)
        self._under_way: deque[CudaEvent] = deque()
        self._newest: BulkEvent | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"bulk-{'up' if up else 'down'}")

    def submit(self, source: torch.Tensor, target: torch.Tensor, after: CudaEvent) -> BulkEvent:
        """Submits a copy (both 1-D) that runs after `after`."""
        self._newest = BulkEvent(self._thread.submit(self._hand_on, source, target, after))
        return self._newest

    def _hand_on(self, source: torch.Tensor, target: torch.Tensor, after: CudaEvent) -> CudaEvent:
        """Hands all pieces to the device, each after earlier ones end. Returns the end of the last."""
        torch.cuda.set_device(self._device)
        pieces = in_pieces(source, target, PIECE // _HALVES)
        after.before(self.stream)
        begin = CudaEvent(self.stream)
        for piece in pieces:
            while len(self._under_way) >= _HALVES:
                self._under_way.popleft().synchronize()  # sync: on this thread, which does nothing else
            self._under_way.append(start_copies([piece], self.stream, up=self._up, blocking=True))
        end = self._under_way[-1]
        self._copies.add(begin, end, source.numel() * source.element_size(), up=self._up)
        return end

    def hand_on(self) -> None:
        """Returns when everything asked for is with the device."""
        if self._newest is not None:
            self._newest.handed_on()

    def close(self) -> None:
        self._thread.shutdown()
