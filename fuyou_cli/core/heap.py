"""Computes how much memory a block takes in the C library's heap, with the settings of a run."""

from __future__ import annotations

from .units import MiB

MAPPED = 24 * MiB  # larger blocks are mapped on their own and go back to the system whole; smaller ones share the heap
HOLES = 1.0  # of what is alive in the heap: what its holes take beside that at most (measured, scripts/results/TRIED.md)
HELD = 0.5  # the same of what is only held, a whole batch at a time
BESIDE = 0.1  # of what is mapped on its own: what a product of matrices takes while it works on it


def alive(size: int) -> int:
    """Returns the memory that a block of `size` bytes takes. One just too small to be mapped takes more than one that is."""
    return size if size >= MAPPED else int(size * (1 + HOLES))


def worked_on(size: int) -> int:
    """Returns the same for a block that a kernel works on and that needs more memory, to pack a matrix."""
    return int(size * (1 + BESIDE)) if size >= MAPPED else alive(size)


def held(size: int) -> int:
    """Returns the same for a block that no kernel works on while memory peaks, and that has few other blocks near it."""
    return size if size >= MAPPED else int(size * (1 + HELD))
