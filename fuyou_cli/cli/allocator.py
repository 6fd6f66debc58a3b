"""glibc's allocator, told once how to behave in a process whose memory is planned."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# Larger blocks are mapped on their own and go back to the system when freed. At 4 MiB every activation would be: least
# memory, but a step then spends a tenth of its CPU time faulting pages in (CHANGELOG.md, tried).
_MMAP_THRESHOLD = 32 << 20
_TRIM_THRESHOLD = 64 << 20


def settle_allocator() -> None:
    """Fixes the thresholds (glibc would move them as it goes) and the number of arenas, so that memory in use and memory
    taken stay close. Elsewhere than on glibc nothing happens: there is no mallopt."""
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_ARENA_MAX, 2)
    mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)


def trim() -> None:
    """Gives the heap's free pages back. Between two stages nothing large is alive, so that each starts without the holes
    the one before left; within a stage blocks are reused without faults."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
