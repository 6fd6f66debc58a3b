"""glibc's allocator, told once how to behave in a process whose memory is planned."""

from __future__ import annotations

import ctypes

from fuyou_cli.core.heap import MAPPED

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# Larger blocks are mapped on their own and go back to the system when freed. Before training nearly all are, so that the
# heap starts it small and whole: building the model's skeleton alone left 1.4 GiB of holes, whose pages activations then
# touched one after the other. In training at 4 MiB every activation would be: least memory, but a step then spends a tenth
# of its CPU time faulting pages in (CHANGELOG.md, tried).
_MMAP_THRESHOLD_BEFORE = 1 << 20
_TRIM_THRESHOLD = 64 << 20


def settle_allocator() -> None:
    """Fixes the thresholds (glibc would move them as it goes) and the number of arenas, so that memory in use and memory
    taken stay close. Elsewhere than on glibc nothing happens: there is no mallopt."""
    _mallopt(_M_ARENA_MAX, 2)
    _mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BEFORE)
    _mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)


def settle_for_training() -> None:
    """From now on activations share the heap, which is trimmed when training says so (training/trimming.py)."""
    trim()
    _mallopt(_M_MMAP_THRESHOLD, MAPPED)


def _mallopt(what: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(what, value)


def trim() -> None:
    """Gives the heap's free pages back."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
