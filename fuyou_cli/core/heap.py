"""Computes the memory of a block in the C library's heap, with the settings of a run."""

from __future__ import annotations

from .units import MiB

MAPPED = 24 * MiB  # larger blocks are mapped on their own and go back to the system whole; smaller ones share the heap
HOLES = 1.0  # bytes in holes per byte alive in the heap, at most (measured, scripts/results/TRIED.md)
HELD = 0.5  # the same for blocks that are only held, a whole batch at a time
BESIDE = 0.1  # extra bytes per mapped byte while a matrix product works on it


def alive(size: int) -> int:
    """Returns the memory that a block of `size` bytes takes. A block just below MAPPED takes more than one above it."""
    return size if size >= MAPPED else int(size * (1 + HOLES))


def worked_on(size: int) -> int:
    """Returns the memory of a block while a kernel works on it. The kernel needs more, to pack a matrix."""
    return int(size * (1 + BESIDE)) if size >= MAPPED else alive(size)


def held(size: int) -> int:
    """Returns the memory of a block that no kernel works on at the memory peak, and that has few other blocks near it."""
    return size if size >= MAPPED else int(size * (1 + HELD))
