"""Emulates an accelerator: its own memory (other CPU tensors), its own copy engines (one thread each way), and a thread that
sums squares.

Copies really run beside compute. Each direction runs in order (boundaries before pieces of large copies), and the two
directions in no order. Device memory starts as NaN bytes, and so does the target of a copy from the moment it is asked for. So
code that does not wait for a copy is found.

With a pace it also takes time like a GPU whose host runs ahead. Copies take the time that the pace says. Compute is told how
long it takes (`takes`); copies after it wait that long, and the launching thread does not.

`register` has recipes, plans and runs of this process accept `offload.device: emulated`. As a program this file is the command
`fuyou` with that device:

    python tests/emulated.py finetune RECIPE offload.device=emulated
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a program

from fuyou_cli.core.units import gib
from fuyou_cli.engine.devices import OPENERS
from fuyou_cli.engine.devices.base import (
    MOST_COPIES,
    PIECE,
    Copy,
    Device,
    Event,
    Moment,
    Squares,
    ValueRun,
    in_pieces,
    squares_of,
)
from fuyou_cli.recipe import rules
from fuyou_cli.recipe.schema import OffloadSection, Recipe
from fuyou_cli.spec.hardware import ON_PROCESSOR


class Pace(Protocol):
    """Says how long copies take."""

    def copied(self, *, up: bool, begins: float, size: int) -> None:
        """Returns when a piece of `size` bytes is copied. It may begin at `begins`, after the last piece of its direction."""
        ...


class Rates:
    """Copies at a fixed rate each way (bytes per second). A thread that wakes late loses no time."""

    def __init__(self, up: float, down: float) -> None:
        self._seconds, self._over = {True: 1 / up, False: 1 / down}, {True: 0.0, False: 0.0}

    def copied(self, *, up: bool, begins: float, size: int) -> None:
        self._over[up] = max(self._over[up], begins) + size * self._seconds[up]
        time.sleep(max(0.0, self._over[up] - time.monotonic()))


class ComputeClock:
    """Tells when the compute submitted so far ends, on the monotonic clock. Without rates it has ended before the call
    returned."""

    def __init__(self) -> None:
        self.over = 0.0

    def reaches(self, moment: float) -> None:
        """Lets compute that is submitted from now on begin no earlier than this."""
        self.over = max(self.over, moment)

    def takes(self, seconds: float) -> None:
        """Adds the time of what was submitted last, after the rest. The device cannot end before its launch."""
        self.over = max(self.over + seconds, time.monotonic())


class ComputeEvent(Event):
    """Marks a point in the emulated compute."""

    def __init__(self, moment: float) -> None:
        self.moment = moment

    def synchronize(self) -> None:
        if (left := self.moment - time.monotonic()) > 0:  # to sleep for no time would still yield the core
            time.sleep(left)

    def done(self) -> bool:
        return time.monotonic() >= self.moment


class CopyEvent(Event):
    """Marks the end of a copy. A copy engine sets it."""

    def __init__(self, clock: ComputeClock) -> None:
        self._clock, self._is_over, self._running = clock, False, threading.Lock()
        self._running.acquire()
        self.error: RuntimeError | None = None

    def wait(self) -> None:
        self.synchronize()
        self._clock.reaches(time.monotonic())

    def synchronize(self) -> None:
        with self._running:
            pass
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        return self._is_over

    def ends(self) -> None:
        """Lets those go on who wait. Called once."""
        self._is_over = True
        self._running.release()

    def fails(self, error: RuntimeError) -> None:
        self.error = error
        self.ends()


@dataclass(eq=False, slots=True)
class _Copying:
    """Describes a requested copy. `begins`: when it can begin, after the compute before it; `left`: pieces still to be
    copied."""

    begins: float
    left: deque[tuple[torch.Tensor, torch.Tensor]]
    event: CopyEvent


class CopyEngine:
    """Copies in one direction, on a thread, in the order of the requests. But no piece of a bulk copy begins while another copy
    could. `pace`: how long copies take, None for as fast as possible."""

    def __init__(
        self, name: str, log: deque[Copy], clock: ComputeClock, *, up: bool, pace: Pace | None = None, piece: int = PIECE
    ) -> None:
        self._log, self._clock, self._up, self._pace, self._piece = log, clock, up, pace, piece
        self._urgent, self._bulk = deque[_Copying](), deque[_Copying]()
        self._asked = threading.Condition()
        self._closed = False
        self._failure: RuntimeError | None = None  # why the thread has ended: nobody may wait for it any more
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, source: torch.Tensor, target: torch.Tensor, *, begins: float, bulk: bool) -> CopyEvent:
        return self.submit_all(in_pieces(source, target, self._piece) if bulk else [(source, target)], begins=begins, bulk=bulk)

    def submit_all(
        self, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], *, begins: float, bulk: bool = False
    ) -> CopyEvent:
        """Submits copies in order, with one event for all."""
        if self._pace is None:  # a device with a pace is for timing, so it does not spend the launching thread's time on this
            for _, target in pieces:
                poison(target)
        copying = _Copying(max(begins, time.monotonic()), deque(pieces), CopyEvent(self._clock))
        with self._asked:
            if self._failure is not None:
                copying.event.fails(self._failure)
                return copying.event
            (self._bulk if bulk else self._urgent).append(copying)
            self._asked.notify()
        return copying.event

    @torch.no_grad()
    def _run(self) -> None:
        while (queue := self._next()) is not None:
            copying = queue[0]
            try:
                self._take(copying, *copying.left.popleft())
            except RuntimeError as error:  # shape or dtype mismatch; raised again by whoever waits
                copying.event.error = error
                copying.left.clear()
            except BaseException as error:
                self._ends_with(RuntimeError(f"the copy thread failed: {error!r}"))
                raise
            if not copying.left:
                copying.event.ends()
                with self._asked:
                    queue.popleft()

    def _ends_with(self, failure: RuntimeError) -> None:
        """Tells everybody who waits for this thread, now or later."""
        with self._asked:
            self._failure = failure
            for copying in (*self._urgent, *self._bulk):
                copying.event.fails(failure)
            self._urgent.clear()
            self._bulk.clear()

    def _next(self) -> deque[_Copying] | None:
        """Returns the queue whose first copy goes on, as soon as one can; None at the end."""
        with self._asked:
            while True:
                now = time.monotonic()
                waiting = [queue for queue in (self._urgent, self._bulk) if queue]
                ready = next((queue for queue in waiting if queue[0].begins <= now), None)
                if ready is not None:
                    return ready
                if self._closed:
                    return None
                self._asked.wait(min((queue[0].begins - now for queue in waiting), default=None))

    def _take(self, copying: _Copying, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies one piece, taking the time that the pace says."""
        begin, size = time.monotonic(), source.numel() * source.element_size()
        self.copy(source, target)
        if self._pace is not None:
            self._pace.copied(up=self._up, begins=copying.begins, size=size)
        self._log.append(Copy(up=self._up, begin=begin, end=time.monotonic(), bytes=size))

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    def synchronize(self) -> None:
        with self._asked:
            events = [copying.event for copying in (*self._urgent, *self._bulk)]
        for event in events:
            event.synchronize()

    def close(self) -> None:
        """Ends the thread after all requested copies."""
        with self._asked:
            self._closed = True
            self._failure = self._failure or RuntimeError("the device is closed")
            self._asked.notify()
        self._thread.join()


def poison(target: torch.Tensor) -> None:
    """Fills a copy's target with NaN, or with ids of no token, so that compute that reads it too early shows."""
    target.fill_(torch.nan if target.is_floating_point() else True if target.dtype == torch.bool else -1)


class _Memory:
    """Counts the bytes of device memory that are alive, like a device's allocator, and refuses more than `limit`."""

    def __init__(self, limit: int | None) -> None:
        self.limit, self.live, self.peak = limit, 0, 0

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if self.limit is not None and self.live + size > self.limit:
            left = f"{gib(self.live)} of {gib(self.limit)} are in use"
            raise torch.OutOfMemoryError(f"emulated device out of memory. Tried to allocate {gib(size)}; {left}")
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._give_back, size).atexit = False
        return tensor

    def _give_back(self, size: int) -> None:
        self.live -= size


class EmulatedDevice(Device):
    """Emulates a device. Random streams are the CPU's; memory and copies are its own. What compute allocates itself is not
    counted. `memory`: bytes that may be in use. `pace`: how long copies take (None: as fast as possible)."""

    name = "emulated"
    separate = True

    def __init__(self, memory: int | None = None, *, pace: Pace | None = None, piece: int = PIECE) -> None:
        self._memory = _Memory(memory)
        self._log, self._clock = deque[Copy](maxlen=MOST_COPIES), ComputeClock()
        self._up = CopyEngine("emulated-up", self._log, self._clock, up=True, pace=pace, piece=piece)
        self._down = CopyEngine("emulated-down", self._log, self._clock, up=False, pace=pace, piece=piece)
        self._summing = ThreadPoolExecutor(1, thread_name_prefix="emulated-squares")

    def empty(self, size: int) -> torch.Tensor:
        return self._memory.take(torch.full((size,), 0xFF, dtype=torch.uint8))  # NaN in every float format

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        return self._memory.take(super().empty_like(host))

    def upload_now(self, host: torch.Tensor) -> torch.Tensor:
        return host.clone()

    def upload(self, host: torch.Tensor, device: torch.Tensor, *, after: Event | None = None, bulk: bool = False) -> Event:
        begins = after.moment if isinstance(after, ComputeEvent) else self._clock.over
        return self._up.submit(host, device, begins=begins, bulk=bulk)  # copies run beside compute

    def download(self, device: torch.Tensor, host: torch.Tensor, *, bulk: bool = False) -> Event:
        return self._down.submit(device, host, begins=self._clock.over, bulk=bulk)

    def download_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Event]:
        return [] if not pairs else [self._down.submit_all(pairs, begins=self._clock.over)]

    def upload_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Event]:
        return [] if not pairs else [self._up.submit_all(pairs, begins=self._clock.over)]

    def compute_end(self) -> Event:
        return ComputeEvent(self._clock.over)

    def mark(self) -> Moment:
        self._clock.reaches(time.monotonic())  # compute submitted later begins later
        moment = self._clock.over
        return lambda: moment

    def takes(self, seconds: float) -> None:
        """Notes how long the compute submitted last takes on the device. Its results are not available before."""
        self._clock.takes(seconds)

    def squares(self, flat: torch.Tensor, runs: Sequence[ValueRun], lanes: torch.Tensor) -> Squares:
        return self._summing.submit(squares_of, flat, runs)

    def copies(self) -> list[Copy]:
        ended = [self._log.popleft() for _ in range(len(self._log))]  # copy threads only append
        return [copy for copy in ended if copy.bytes]

    def memory(self) -> int:
        return self._memory.live

    def peak_memory(self) -> int:
        return self._memory.peak

    def free_memory(self) -> int | None:
        return None if self._memory.limit is None else self._memory.limit - self._memory.live

    def synchronize(self) -> None:
        self.compute_end().synchronize()
        self._up.synchronize()
        self._down.synchronize()
        self._summing.submit(int).result()

    def close(self) -> None:
        self._up.close()
        self._down.close()
        self._summing.shutdown()


GONE = next(row for row in rules.REMOVED if row.path == "offload.device")  # what users are told


def register() -> None:
    """Makes `emulated` a device of this process, as cpu and cuda are."""
    rules.REMOVED = tuple(row for row in rules.REMOVED if row is not GONE)
    OPENERS["emulated"] = EmulatedDevice
    ON_PROCESSOR.add("emulated")
    OffloadSection.model_fields["device"].annotation = Literal["auto", "cpu", "cuda", "emulated"]  # type: ignore[assignment]
    OffloadSection.model_rebuild(force=True)
    Recipe.model_rebuild(force=True)


if __name__ == "__main__":
    from fuyou_cli.cli.app import main

    register()
    main()
