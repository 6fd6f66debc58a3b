"""Defines a CUDA device: two copy streams each way beside the compute stream (`cuda_copies`), events between them, and a pinned
arena.

Correctness comes first: uploads wait for compute that may still read their target, downloads wait for compute that produces
their source. A target fresh from torch's allocator may be memory that submitted compute still uses, so such an upload waits for
all compute. Only an upload to memory that stays allocated may be submitted behind an earlier point, its last reader. Host
memory is registered with cudaHostRegister, because torch's own pinned allocator rounds sizes up to powers of two.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import suppress

import torch

from ...core.errors import FuyouError
from .base import Copy, Device, Event, Moment, Run, Squares
from .cuda_copies import BulkCopies, CudaCopies, CudaEvent
from .lanes import Square, squares_in_lanes
from .pinned import STAGING, PinnedMemory, Staging
from .square_kernel import square_kernel


def free_memory(card: torch.device | None = None) -> int:
    """Returns the bytes of a card (None: the current one) that this process could still fill: free memory, and what its own
    allocator holds without using it. Creates a context if there is none."""
    free, _ = torch.cuda.mem_get_info(card)
    return int(free + torch.cuda.memory_reserved(card) - torch.cuda.memory_allocated(card))


def _register(address: int, size: int) -> bool:
    return not int(torch.cuda.cudart().cudaHostRegister(address, size, 0))


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # its result is ignored: a context that has failed was reported before


class CudaSquares:
    """Holds squares on their way to their own pinned memory."""

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
                "no CUDA device is usable by this torch build",
                hint="run `fuyou doctor`, or set offload.device=cpu",
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
        self._staging: list[Staging] = []  # up and down, if not all host memory could be pinned
        self._square: dict[torch.dtype, Square | None] = {}

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.torch_device)

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self.torch_device)

    def told(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self.torch_device)  # sync: from pageable memory

    def upload(self, host: torch.Tensor, device: torch.Tensor, *, after: Event | None = None, bulk: bool = False) -> Event:
        after = self.computed() if after is None else after
        assert isinstance(after, CudaEvent)
        return self._copy(host, device, host, after, bulk=bulk)

    def download(self, device: torch.Tensor, host: torch.Tensor, *, bulk: bool = False) -> Event:
        return self._copy(device, host, host, self.computed(), bulk=bulk)

    def download_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Event]:
        if not pairs or any(self._host.refuses(host) for _, host in pairs):
            return super().download_all(pairs)
        self.computed().before(self._down)
        return [self._copies.make(pairs, self._down, up=False, blocking=True)]

    def upload_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Event]:
        if not pairs or any(self._host.refuses(host) for host, _ in pairs):
            return super().upload_all(pairs)
        self.computed().before(self._up)
        return [self._copies.make(pairs, self._up, up=True)]

    def computed(self) -> CudaEvent:
        return CudaEvent(torch.cuda.current_stream(), blocking=True)  # updates need the core that a spinning host would take

    def mark(self) -> Moment:
        event, zero, zero_at = self.computed(), self._zero, self._zero_at

        def moment() -> float:
            event.synchronize()  # sync: called at the end of a step, when all of it has ended
            return zero_at + event.seconds_after(zero)

        return moment

    def _copy(self, source: torch.Tensor, target: torch.Tensor, host: torch.Tensor, after: CudaEvent, *, bulk: bool) -> Event:
        up = source is host
        large = self._bulk[not up]
        stream = large.stream if bulk else self._up if up else self._down

        def copy(source: torch.Tensor, target: torch.Tensor) -> CudaEvent:
            after.before(stream)
            return self._copies.make([(source, target)], stream, up=up, blocking=not up)

        if self._host.refuses(host):
            return self._staging[not up].submit(source, target, copy)
        return large.submit(source, target, after) if bulk else copy(source, target)

    def squares(self, flat: torch.Tensor, runs: Sequence[Run], lanes: torch.Tensor) -> Squares:
        """Computes squares on the compute stream, which nothing else waits for. The results leave on their own stream."""
        lanes = lanes.view(torch.float64)
        if flat.dtype not in self._square:
            self._square[flat.dtype] = square_kernel(flat.dtype, lanes)
        return self._brought(squares_in_lanes(flat, runs, lanes, kernel=self._square[flat.dtype]))

    def numbers(self, values: torch.Tensor) -> Squares:
        return self._brought(values.flatten().to(torch.float64, copy=True))  # a copy that nothing else writes to

    def _brought(self, found: torch.Tensor) -> Squares:
        host = torch.empty(len(found), dtype=torch.float64, pin_memory=True)
        self._results.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._results):
            host.copy_(found, non_blocking=True)
        found.record_stream(self._results)
        return CudaSquares(host, CudaEvent(self._results))

    def _set_clock(self) -> None:
        """Notes which moment of the host's clock equals one of the device's. Called often, because the time since then is in
        single precision."""
        self._zero = CudaEvent(self._clock)
        self._zero.synchronize()
        self._zero_at = time.monotonic()

    def copies(self) -> list[Copy]:
        found = []
        for up, begin, end, size in self._copies.take_ended():
            first, last = (self._zero_at + event.seconds_after(self._zero) for event in (begin, end))
            found.append(Copy(up=up, begin=first, end=last, bytes=size))
        self._set_clock()
        return found

    def pin(self, host: torch.Tensor) -> int:
        refused = self._host.pin(host)
        if refused:
            with suppress(RuntimeError):  # the refusal stays the last error of the CUDA runtime until a launch reports it
                torch.empty(1, device=self.torch_device).fill_(0)
            for up in () if self._staging else (True, False):
                buffers = [torch.empty(STAGING, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
                self._staging.append(Staging("staging-up" if up else "staging-down", buffers, up=up))
        return refused

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
        for staging in self._staging:
            staging.synchronize()
        for bulk in self._bulk:
            bulk.hand_on()
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        for staging in self._staging:
            staging.close()
        for bulk in self._bulk:
            bulk.close()
        with suppress(RuntimeError):  # a context that has failed raises again; it was reported before
            torch.cuda.synchronize(self.torch_device)
            torch.cuda.set_per_process_memory_fraction(1.0, self.torch_device)  # the limit was only for this run
        self._staging.clear()
        self._bulk.clear()
        self._host.close()
