"""Host memory that a device copies from and to directly, and the staging buffers for memory that cannot be registered."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from .base import Event

STAGING = 4 << 20  # bytes of a buffer; each direction has two
_PARTS = 64  # a refused registration is tried in halves, down to this part of the whole
_PAGE = 4096

Copy = Callable[[torch.Tensor, torch.Tensor], Event]  # the device's own copy of registered memory


class PinnedMemory:
    """Registered memory in as few pieces as possible. A copy is direct only if it lies within one of them, because a
    driver may refuse to copy across the edge of a registration."""

    def __init__(self, register: Callable[[int, int], bool], unregister: Callable[[int], None]) -> None:
        self._register, self._unregister = register, unregister  # called with (address, bytes) and (address)
        self._asked: list[tuple[int, int]] = []  # (first address, one past the last)
        self._pieces: list[tuple[int, int]] = []
        self._held: list[torch.Tensor] = []  # registered memory must not be unmapped
        self._incomplete = False  # some memory is not registered, or not in one piece

    def pin(self, host: torch.Tensor) -> int:
        """Registers `host`. Returns the bytes that could not be registered."""
        begin, end = _extent(host)
        self._asked.append((begin, end))
        self._held.append(host)
        whole = end - begin
        size, left = whole, whole
        while left and size * _PARTS >= whole:
            if self._register(begin, size):
                self._pieces.append((begin, begin + size))
                begin, left = begin + size, left - size
                size = min(size, left)
            else:
                size = size // 2 // _PAGE * _PAGE
                if not size:
                    break
        self._incomplete = self._incomplete or self._pieces[-1:] != [(end - whole, end)]
        return left

    def refuses(self, host: torch.Tensor) -> bool:
        """Whether registering `host` as a whole was requested and failed."""
        if not self._incomplete:  # asked for every copy
            return False
        begin, end = _extent(host)
        return any(first < end and begin < last for first, last in self._asked) and not any(
            first <= begin and end <= last for first, last in self._pieces
        )

    def close(self) -> None:
        for begin, _ in self._pieces:
            self._unregister(begin)
        self._asked.clear()
        self._pieces.clear()
        self._held.clear()


class Staging:
    """Copies in one direction between a device and host memory that is not registered. A thread copies piece by piece through
    two registered buffers, so the caller does not wait. The processor passes over the bytes once more."""

    def __init__(self, name: str, buffers: list[torch.Tensor], *, up: bool) -> None:
        self._buffers, self._up = buffers, up
        self._under_way: deque[tuple[Event, torch.Tensor, torch.Tensor]] = deque()  # in the order in which buffers are used
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, source: torch.Tensor, target: torch.Tensor, copy: Copy) -> StagedCopy:
        """Submits a copy. `copy` copies the pieces between a buffer and the device."""
        return StagedCopy(self._thread.submit(self._stage, source, target, copy))

    def synchronize(self) -> None:
        """Waits until everything asked for so far has been copied."""
        nothing = torch.empty(0, dtype=torch.uint8)
        self.submit(nothing, nothing, lambda source, target: _never()).synchronize()

    def close(self) -> None:
        self._thread.shutdown()

    def _stage(self, source: torch.Tensor, target: torch.Tensor, copy: Copy) -> Event | None:
        last: Event | None = None
        for part, there in _pieces(source, target, self._buffers[0].numel()):
            while len(self._under_way) >= len(self._buffers):
                self._take()
            buffer = self._buffers[0][: part.numel()]
            self._buffers.append(self._buffers.pop(0))
            if self._up:
                _move(part, buffer)
                last = copy(buffer, there)
                self._under_way.append((last, buffer, buffer))
            else:
                self._under_way.append((copy(part, buffer), buffer, there))
        while self._under_way and not self._up:
            self._take()
        return last

    def _take(self) -> None:
        """Waits for the oldest piece, so that its buffer is free."""
        event, buffer, host = self._under_way.popleft()
        event.synchronize()
        if host is not buffer:
            _move(buffer, host)


class StagedCopy(Event):
    """Marks the end of a copy in pieces. `last`: the end of the last piece's copy to the device."""

    def __init__(self, last: Future[Event | None]) -> None:
        self._last = last

    def wait(self) -> None:
        if (last := self._last.result()) is not None:
            last.wait()

    def synchronize(self) -> None:
        if (last := self._last.result()) is not None:
            last.synchronize()

    def done(self) -> bool:
        return self._last.done() and ((last := self._last.result()) is None or last.done())


def _never() -> Event:
    raise AssertionError("nothing has no pieces")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the first address and one past the last."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def _pieces(source: torch.Tensor, target: torch.Tensor, most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Returns both tensors as bytes, in pieces of at most `most`. They must have the same layout, without gaps."""
    if source.shape != target.shape or source.stride() != target.stride() or source.dtype != target.dtype:
        raise RuntimeError(f"a staged copy of {tuple(source.shape)} to {tuple(target.shape)} changes its layout")
    flat = [tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in (source, target)]
    if _extent(source)[1] - _extent(source)[0] != flat[0].numel():
        raise RuntimeError(f"a staged copy of strides {source.stride()} has gaps")
    yield from zip(flat[0].split(most), flat[1].split(most), strict=True)


def _move(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies without torch's threads, which are busy with compute. Releases the interpreter lock."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
