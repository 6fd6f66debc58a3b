"""The interface between the executor and a device.

Host memory is always ordinary (pinned, where that means something) CPU tensors. A device with memory of its own
(`separate`) computes on copies: uploads and downloads are ordered after what they depend on and run beside compute. On
device cpu host memory is device memory and nothing is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

MOST_COPIES = 1 << 14  # that are remembered until somebody asks


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One copy between host and device, when it ran on the monotonic clock (seconds)."""

    up: bool  # to the device; else back
    begin: float
    end: float
    bytes: int


class CopyLog:
    """Copies that are over, the oldest forgotten where nobody asks. Written by copy threads, read by the one that steps."""

    def __init__(self) -> None:
        self._copies: deque[Copy] = deque(maxlen=MOST_COPIES)

    def add(self, copy: Copy) -> None:
        self._copies.append(copy)

    def take(self) -> Iterator[Copy]:
        while self._copies:
            yield self._copies.popleft()


class Event(Protocol):
    """A point in a device's work."""

    def wait(self) -> None:
        """Compute submitted from now on runs after this point."""

    def synchronize(self) -> None:
        """Returns when this point has passed."""

    def done(self) -> bool:
        """Whether it has passed already; never waits."""


Run = tuple[int, int]  # of values: the first, and how many


class Squares(Protocol):
    """Sums of squares of runs of values, in double: infinite or NaN where a value is not finite."""

    def done(self) -> bool:
        """Whether they are there; never waits."""

    def values(self) -> list[float]:
        """One per run, in order; waits until they are there."""


class Device(Protocol):
    """One place to compute."""

    name: str
    torch_device: torch.device
    separate: bool

    def empty(self, size: int) -> torch.Tensor:
        """`size` bytes of device memory (uint8, 1-D), to be viewed by dtype. Raises torch.OutOfMemoryError beyond what the
        device was opened with."""

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        """Device memory for a copy of `host`, of its shape and strides."""

    def upload(self, host: torch.Tensor, device: torch.Tensor, *, after: Event | None = None, bulk: bool = False) -> Event:
        """Host to device, after the compute that may still read `device`: what ran before `after`, or all submitted so far.
        With `bulk` (1-D, whose memory stays) behind boundaries, in pieces: in no order with copies that are not."""

    def download(self, device: torch.Tensor, host: torch.Tensor, *, bulk: bool = False) -> Event:
        """Device to host, after the compute submitted so far (it produces `device`). `bulk` as above."""

    def computed(self) -> Event:
        """The point behind the compute submitted so far."""

    def squares(self, flat: torch.Tensor, runs: Sequence[Run], lanes: torch.Tensor) -> Squares:
        """Of runs of `flat` (1-D, in device memory), after the compute submitted so far; `flat` stays as it is until they are
        there. The order of additions is fixed: the same bits on every device of this kind. `lanes`: device memory to compute
        in, 8 bytes for each of the `square_lanes` of the longest run; no other call has it meanwhile, on device cpu none is
        needed."""

    def pin(self, host: torch.Tensor) -> int:
        """Registers host memory for direct transfers, for as long as the device is open. Returns the bytes that could not be:
        copies of those pass through a small staging buffer."""

    def seed(self, seed: int) -> None:
        """Seeds the generators that compute on this device draws from."""

    def random_state(self) -> object: ...

    def restore_random_state(self, state: object) -> None: ...

    def copies(self) -> list[Copy]:
        """Those that ended since the last call; none on device cpu."""

    def memory(self) -> int:
        """Bytes of device memory in use; 0 on device cpu."""

    def peak_memory(self) -> int:
        """Bytes of device memory in use at most so far; 0 on device cpu."""

    def free_memory(self) -> int | None:
        """Bytes that could still be had; None on device cpu, and where nothing says."""

    def synchronize(self) -> None:
        """Returns when all compute and copies submitted so far have finished."""

    def close(self) -> None:
        """Lets go of what it has of the host. What was under way has failed or is over: nothing is raised for it."""
