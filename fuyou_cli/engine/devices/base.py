"""Defines a device as the executor sees it, and the simplest one: the host itself.

Host memory is always ordinary CPU tensors (pinned, if that means something). A device with its own memory (`separate`) computes
on copies. Uploads and downloads run after what they depend on, and beside compute. On device cpu host memory is device memory,
nothing is copied, and every event has already passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch

from ...spec.model import Dtype
from ...swap.kernels import sum_squares

MOST_COPIES = 1 << 14  # copies that are remembered until the caller asks
PIECE = 32 << 20  # bytes: 1.5 ms of PCIe 4, a quarter of a micro-batch's forward; starting a copy costs far less

Moment = Callable[[], float]  # returns when something happened, in monotonic seconds; may wait for it
ValueRun = tuple[int, int]  # a run of values: the first, and how many


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Describes one copy between host and device, and when it ran on the monotonic clock (seconds)."""

    up: bool  # True: to the device; False: back
    begin: float
    end: float
    bytes: int


class Event:
    """Marks a point in a device's work. This base class stands for work that was done before the call returned."""

    def wait(self) -> None:
        """Makes compute submitted from now on run after this point."""

    def synchronize(self) -> None:
        """Waits until this point has passed."""

    def done(self) -> bool:
        """Whether this point has passed already. Never waits."""
        return True


class Squares(Protocol):
    """Sums of squares of runs of values, in double. A sum is infinite or NaN if a value is not finite."""

    def done(self) -> bool:
        """Whether the sums are there. Never waits."""

    def result(self) -> list[float]:
        """Returns one sum per run, in order. Waits until they are there."""


class Device:
    """Computes, and copies between host and device. This base class is device cpu."""

    name = "cpu"
    torch_device = torch.device("cpu")
    separate = False

    def empty(self, size: int) -> torch.Tensor:
        """Allocates `size` bytes of device memory (uint8, 1-D), to be viewed by dtype. Raises torch.OutOfMemoryError beyond
        what the device was opened with."""
        return torch.empty(size, dtype=torch.uint8)

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        """Allocates device memory for a copy of `host`, with its shape and strides."""
        return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype)

    def upload_now(self, host: torch.Tensor) -> torch.Tensor:
        """Returns a small tensor (ids, targets) on the device. It may wait for all submitted work, so call it before
        submitting."""
        return host

    def upload(self, host: torch.Tensor, device: torch.Tensor, *, after: Event | None = None, bulk: bool = False) -> Event:
        """Copies after the compute that may still read `device`: what was submitted before `after`, or all submitted so far.
        With `bulk` (1-D, whose memory stays valid) it copies in pieces, after boundaries, and in no order with copies that are
        not bulk."""
        device.copy_(host)
        return Event()

    def download(self, device: torch.Tensor, host: torch.Tensor, *, bulk: bool = False) -> Event:
        """Copies after the compute submitted so far, which produces `device`. `bulk`: as for `upload`."""
        host.copy_(device)
        return Event()

    def download_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Event]:
        """Copies several tensors (device, host) like `download`, at once. Returns when all of them are over."""
        return [self.download(device, host) for device, host in pairs]

    def upload_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Event]:
        """Does the same the other way (host, device), like `upload`."""
        return [self.upload(host, device) for host, device in pairs]

    def compute_end(self) -> Event:
        """Returns the point after all compute submitted so far."""
        return Event()

    def mark(self) -> Moment:
        """Returns a function that tells when the compute submitted so far ended, including its waits. If the device had nothing
        left to do, that is the moment of this call."""
        now = time.monotonic()
        return lambda: now

    def squares(self, flat: torch.Tensor, runs: Sequence[ValueRun], lanes: torch.Tensor) -> Squares:
        """Sums runs of `flat` (1-D, in device memory), after the compute submitted so far. Do not change `flat` until the sums
        are there. The order of additions is fixed: every device of this kind gives the same bits. `lanes`: device memory to
        compute in, 8 bytes for each of the `square_lanes` of the longest run, used only by this call. Device cpu needs none."""
        known = Future[list[float]]()
        known.set_result(squares_of(flat, runs))
        return known

    def numbers(self, values: torch.Tensor) -> Squares:
        """Brings a few numbers from device memory to the host, as compute submitted so far leaves them."""
        known = Future[list[float]]()
        known.set_result([float(value) for value in values.flatten().tolist()])
        return known

    def pin(self, host: torch.Tensor) -> None:
        """Registers host memory for direct transfers, for as long as the device is open. Raises OutOfSpaceError where that is
        refused."""

    def seed(self, seed: int) -> None:
        # Torch.manual_seed would format a stack for every backend that is not started: 0.3 ms.
        torch.default_generator.manual_seed(seed)

    def random_state(self) -> object:
        return torch.get_rng_state()

    def restore_random_state(self, state: object) -> None:
        assert isinstance(state, torch.Tensor)
        torch.set_rng_state(state)

    def copies(self) -> list[Copy]:
        """Returns the copies that ended since the last call; none on device cpu."""
        return []

    def memory(self) -> int:
        """Returns the bytes of device memory in use, 0 on device cpu."""
        return 0

    def peak_memory(self) -> int:
        """Returns the most bytes of device memory in use so far, 0 on device cpu."""
        return 0

    def free_memory(self) -> int | None:
        """Returns the bytes that can still be allocated. It is None on device cpu, and if the device cannot tell."""
        return None

    def synchronize(self) -> None:
        """Waits until all compute and copies submitted so far have finished."""

    def close(self) -> None:
        """Releases the host memory it registered. Work under way has failed or ended, so nothing is raised for it."""


def squares_of(flat: torch.Tensor, runs: Sequence[ValueRun]) -> list[float]:
    """Sums squares with the native library, on this thread and without the GIL, as a fixed tree per run."""
    memory, item = flat.view(torch.uint8).numpy().data, flat.element_size()
    dtype: Dtype = "bfloat16" if flat.dtype == torch.bfloat16 else "float32"
    return [sum_squares(memory[first * item : (first + count) * item], dtype)[0] for first, count in runs]


def in_pieces(source: torch.Tensor, target: torch.Tensor, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cuts a copy (both 1-D) into copies of at most `size` bytes each, in order.

    Weights and gradients are hundreds of MiB per stage, and nothing waits for them soon. A micro-batch's boundary is small, and
    compute waits for it next. So at most `PIECE` bytes of large copies are before a boundary in each direction.
    """
    count = max(1, size // source.element_size())
    return list(zip(source.split(count), target.split(count), strict=True))
