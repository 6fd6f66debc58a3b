"""Sets glibc's allocator once for a process whose memory is planned."""

from __future__ import annotations

import ctypes

from fuyou_cli.core.heap import MAPPED

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# Larger blocks are mapped on their own and go back to the system when freed. Before training nearly all blocks are: the
# heap is then small and without holes when training starts. Building the model's skeleton alone left 1.4 GiB of holes, and
# activations touched their pages one after the other. In training, a limit of 4 MiB would map every activation: that needs
# the least memory, but a step spends a tenth of its CPU time on page faults (scripts/results/TRIED.md).
_MMAP_THRESHOLD_BEFORE = 1 << 20
_TRIM_THRESHOLD = 64 << 20
_PLUG = MAPPED - (256 << 10)  # too small to be mapped itself, even with what malloc adds to a block at the heap's end
_MOST_PLUGS = 1024

_C = ctypes.CDLL(None)
_C.malloc.restype = _C.sbrk.restype = ctypes.c_void_p
_C.malloc.argtypes, _C.sbrk.argtypes, _C.free.argtypes = [ctypes.c_size_t], [ctypes.c_ssize_t], [ctypes.c_void_p]
_plugs: list[int] = []  # addresses


def settle_allocator() -> None:
    """Fixes the thresholds that glibc would move, and the arenas: allocated memory stays close to used memory. Without glibc
    it does nothing."""
    _mallopt(_M_ARENA_MAX, 2)
    _mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BEFORE)
    _mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)


def settle_for_training() -> None:
    """Lets activations share the heap from now on. training/memory_watch.py trims it."""
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
