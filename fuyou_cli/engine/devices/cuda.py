"""Makes CUDA copies: events, and large copies handed to the device piece by piece.

Boundaries have their own stream each way and go at once. Pieces of large copies go on a second stream, at most `PIECE` bytes of
them at a time, in two halves, so that the copy engine has the next half when one ends. A boundary then waits for no more than
that, however the device chooses between its streams (their priorities do not affect copies). A thread for each direction hands
over the next half when one ends, because the launching thread may be waiting or in a long call just then.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch

from ...core.errors import FuyouError, OutOfSpaceError
from ...core.units import gib
from .base import MOST_COPIES, PIECE, Copy, Device, Event, Moment, Squares, ValueRun, in_pieces
from .gpu_kernels import Square, square_kernel, squares_in_lanes

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
    """The copies that a device was asked for, with when they ran: up, from, to, bytes. Threads add to them. A large copy
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


# ---- the device ---------------------------------------------------------------------------------------------------
# Defines a CUDA device: two copy streams each way beside the compute stream (`BulkCopies`), events between them, and a pinned
# arena.
#
# Correctness comes first: uploads wait for compute that may still read their target, downloads wait for compute that produces
# their source. A target fresh from torch's allocator may be memory that submitted compute still uses, so such an upload waits
# for all compute. Only an upload to memory that stays allocated may be submitted behind an earlier point, its last reader.
# Host memory is registered with cudaHostRegister, because torch's own pinned allocator rounds sizes up to powers of two.


def free_memory(card: torch.device | None = None) -> int:
    """Returns the bytes of a card (None: the current one) that this process could still fill: free memory, and what its own
    allocator holds without using it. Creates a context if there is none."""
    free, _ = torch.cuda.mem_get_info(card)
    return int(free + torch.cuda.memory_reserved(card) - torch.cuda.memory_allocated(card))


def _register(address: int, size: int) -> bool:
    if not int(torch.cuda.cudart().cudaHostRegister(address, size, 0)):
        return True
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # a launch takes the error, which the next one would report as its own
    return False


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # its result is ignored: a context that has failed was reported before


class CudaSquares:
    def __init__(self, host: torch.Tensor, arrived: CudaEvent) -> None:
        self._host, self._arrived = host, arrived

    def done(self) -> bool:
        return self._arrived.done()

    def result(self) -> list[float]:
        self._arrived.synchronize()
        return [float(value) for value in self._host.tolist()]


class CudaDevice(Device):
    name = "cuda"
    separate = True

    def __init__(self, memory: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise FuyouError(
                "no CUDA device is usable by this torch build", hint="run `fuyou doctor`, or set offload.device=cpu"
            )
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        total = torch.cuda.get_device_properties(self.torch_device).total_memory
        gc.collect()  # an earlier run of this process is a cycle that still holds its tensors
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)  # memory used by measurements before this run does not count
        torch.cuda.set_per_process_memory_fraction(1.0 if memory is None else min(1.0, memory / total), self.torch_device)
        self._ready(self.torch_device)
        self._up = torch.cuda.Stream()
        self._down = torch.cuda.Stream()
        # For results of a few bytes, which must neither wait for the copies above nor delay compute.
        self._results = torch.cuda.Stream()
        self._copies = CudaCopies()
        self._bulk += [BulkCopies(self.torch_device, self._copies, up=up) for up in (True, False)]
        self._clock = torch.cuda.Stream()  # this stream never has work, so its events pass at once
        self._set_clock()

    def _ready(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._host = PinnedMemory(_register, _unregister)
        self._bulk: list[BulkCopies] = []  # up and down
        self._square: dict[torch.dtype, Square | None] = {}

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.torch_device)

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self.torch_device)

    def upload_now(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self.torch_device)  # sync: from pageable memory

    def upload(self, host: torch.Tensor, device: torch.Tensor, *, after: Event | None = None, bulk: bool = False) -> Event:
        after = self.compute_end() if after is None else after
        assert isinstance(after, CudaEvent)
        return self._copy(host, device, after, up=True, bulk=bulk)

    def download(self, device: torch.Tensor, host: torch.Tensor, *, bulk: bool = False) -> Event:
        return self._copy(device, host, self.compute_end(), up=False, bulk=bulk)

    def download_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Event]:
        if not pairs:
            return []
        self.compute_end().before(self._down)
        return [self._copies.make(pairs, self._down, up=False, blocking=True)]

    def upload_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Event]:
        if not pairs:
            return []
        self.compute_end().before(self._up)
        return [self._copies.make(pairs, self._up, up=True)]

    def compute_end(self) -> CudaEvent:
        return CudaEvent(torch.cuda.current_stream(), blocking=True)  # updates need the core that a spinning host would take

    def mark(self) -> Moment:
        event, zero, zero_at = self.compute_end(), self._zero, self._zero_at

        def moment() -> float:
            event.synchronize()  # sync: called at the end of a step, when all of it has ended
            return zero_at + event.seconds_after(zero)

        return moment

    def _copy(self, source: torch.Tensor, target: torch.Tensor, after: CudaEvent, *, up: bool, bulk: bool) -> Event:
        if bulk:
            return self._bulk[not up].submit(source, target, after)
        stream = self._up if up else self._down
        after.before(stream)
        return self._copies.make([(source, target)], stream, up=up, blocking=not up)

    def squares(self, flat: torch.Tensor, runs: Sequence[ValueRun], lanes: torch.Tensor) -> Squares:
        """Computes squares on the compute stream, which nothing else waits for. The results leave on their own stream."""
        lanes = lanes.view(torch.float64)
        if flat.dtype not in self._square:
            self._square[flat.dtype] = square_kernel(flat.dtype, lanes)
        return self._bring_to_host(squares_in_lanes(flat, runs, lanes, kernel=self._square[flat.dtype]))

    def numbers(self, values: torch.Tensor) -> Squares:
        return self._bring_to_host(values.flatten().to(torch.float64, copy=True))  # a copy that nothing else writes to

    def _bring_to_host(self, values: torch.Tensor) -> Squares:
        host = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
        self._results.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._results):
            host.copy_(values, non_blocking=True)
        values.record_stream(self._results)
        return CudaSquares(host, CudaEvent(self._results))

    def _set_clock(self) -> None:
        """Notes which moment of the host's clock equals one of the device's. Called often, because the time since then is in
        single precision."""
        self._zero = CudaEvent(self._clock)
        self._zero.synchronize()
        self._zero_at = time.monotonic()

    def copies(self) -> list[Copy]:
        copies = []
        for up, begin, end, size in self._copies.take_ended():
            first, last = (self._zero_at + event.seconds_after(self._zero) for event in (begin, end))
            copies.append(Copy(up=up, begin=first, end=last, bytes=size))
        self._set_clock()
        return copies

    def pin(self, host: torch.Tensor) -> None:
        self._host.pin(host)

    def seed(self, seed: int) -> None:
        # Like torch.manual_seed, but without formatting a stack for each backend that is not started (0.3 ms each time).
        torch.default_generator.manual_seed(seed)
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)

    def random_state(self) -> object:
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.torch_device)

    def restore_random_state(self, state: object) -> None:
        assert isinstance(state, tuple)
        torch.set_rng_state(state[0])
        torch.cuda.set_rng_state(state[1], self.torch_device)

    def memory(self) -> int:
        return torch.cuda.memory_reserved(self.torch_device)

    def peak_memory(self) -> int:
        return torch.cuda.max_memory_reserved(self.torch_device)

    def free_memory(self) -> int | None:
        return free_memory(self.torch_device)

    def synchronize(self) -> None:
        for bulk in self._bulk:
            bulk.hand_on()
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        for bulk in self._bulk:
            bulk.close()
        with suppress(RuntimeError):  # a context that has failed raises again; it was reported before
            torch.cuda.synchronize(self.torch_device)
            torch.cuda.set_per_process_memory_fraction(1.0, self.torch_device)  # the limit was only for this run
        self._bulk.clear()
        self._host.close()


# ---- host memory that copies are from and to -----------------------------------------------------------------------


class PinnedMemory:
    """Host memory that a device copies from and to directly, and that must not be unmapped while it does."""

    def __init__(self, register: Callable[[int, int], bool], unregister: Callable[[int], None]) -> None:
        self._register, self._unregister = register, unregister  # called with (address, bytes) and (address)
        self._held: list[torch.Tensor] = []

    def pin(self, host: torch.Tensor) -> None:
        if not self._register(host.data_ptr(), host.nbytes):
            raise OutOfSpaceError(
                f"the GPU's driver cannot pin {gib(host.nbytes)} of host memory",
                hint="end what else pins memory, or lower offload.max_memory.cpu: `fuyou doctor` shows how much can be pinned, "
                "as far as the system tells",
            )
        self._held.append(host)

    def close(self) -> None:
        for host in self._held:
            self._unregister(host.data_ptr())
        self._held.clear()
