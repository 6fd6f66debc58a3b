"""The C library's heap: sets it once for a process whose memory is planned, and computes what a block takes in it."""

from __future__ import annotations

import ctypes

from .units import MiB

MAPPED = 24 * MiB  # larger blocks are mapped on their own and go back to the system whole; smaller ones share the heap
HOLES = 1.0  # bytes in holes per byte alive in the heap, at most (measured, scripts/results/TRIED.md)
HELD = 0.5  # the same for blocks that are only held, a whole batch at a time
BESIDE = 0.1  # extra bytes per mapped byte while a matrix product works on it

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# Larger blocks are mapped on their own and go back to the system when freed. Before training nearly all blocks are: the
# heap is then small and without holes when training starts. Building the model's skeleton alone left 1.4 GiB of holes, and
# activations touched their pages one after the other. In training, a limit of 4 MiB would map every activation: that needs
# the least memory, but a step spends a tenth of its CPU time on page faults (scripts/results/TRIED.md).
_MMAP_THRESHOLD_BEFORE = MiB
_TRIM_THRESHOLD = 64 * MiB
_PLUG = MAPPED - (256 << 10)  # too small to be mapped itself, even with what malloc adds to a block at the heap's end
_MOST_PLUGS = 1024

_C = ctypes.CDLL(None)
_C.malloc.restype = _C.sbrk.restype = ctypes.c_void_p
_C.malloc.argtypes, _C.sbrk.argtypes, _C.free.argtypes = [ctypes.c_size_t], [ctypes.c_ssize_t], [ctypes.c_void_p]
_plugs: list[int] = []  # addresses


def alive(size: int) -> int:
    """Returns the memory that a block of `size` bytes takes. A block just below MAPPED takes more than one above it."""
    return size if size >= MAPPED else int(size * (1 + HOLES))


def worked_on(size: int) -> int:
    """Returns the memory of a block while a kernel works on it. The kernel needs more, to pack a matrix."""
    return int(size * (1 + BESIDE)) if size >= MAPPED else alive(size)


def held(size: int) -> int:
    """Returns the memory of a block that no kernel works on at the memory peak, and that has few other blocks near it."""
    return size if size >= MAPPED else int(size * (1 + HELD))


def settle_allocator() -> None:
    """Fixes the thresholds that glibc would move, and the arenas: allocated memory stays close to used memory. Without glibc
    it does nothing."""
    _mallopt(_M_ARENA_MAX, 2)
    _mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BEFORE)
    _mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)


def settle_for_training() -> None:
    """Lets activations share the heap from now on. training/step_meter.py trims it."""
    trim()
    _mallopt(_M_MMAP_THRESHOLD, MAPPED)


def trim(apart: bool = False) -> None:
    """Gives the heap's free pages back. With `apart`, large blocks are mapped on their own until the next trim."""
    malloc_trim = getattr(_C, "malloc_trim", None)
    if malloc_trim is None:
        return
    while _plugs:
        _C.free(_plugs.pop())
    malloc_trim(0)
    if apart:
        _plug()


def _plug() -> None:
    """Fills every hole that has room for a mapped block. Nothing touches a plug, so it takes no memory."""
    # malloc looks for holes before it maps, and a hole keeps the pages of a block freed in it: a peak had a head's logits,
    # 62 MiB, twice. The first plug that finds no hole lies beyond the heap's end.
    while len(_plugs) < _MOST_PLUGS:
        end = _C.sbrk(0)
        plug = _C.malloc(_PLUG)
        if not plug or _C.sbrk(0) != end or plug > end:
            _C.free(plug)
            return
        _plugs.append(plug)


def _mallopt(what: int, value: int) -> None:
    mallopt = getattr(_C, "mallopt", None)
    if mallopt is not None:
        mallopt(what, value)
