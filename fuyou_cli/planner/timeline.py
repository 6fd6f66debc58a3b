"""`Timeline`: what one simulated step looks like, as data."""

from __future__ import annotations

from dataclasses import dataclass

from .machine import Done


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One request to the store's daemon: "read weights", "write boundary", "update", ... of a stage."""

    what: str
    stage: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One steady-state step. Seconds; `work` begins at the step's begin, longer jobs may have begun before it."""

    step_seconds: float
    forward_seconds: float  # to the end of the last forward visit; the rest is the head and backward
    busy: dict[str, float]  # resource -> seconds it was in use, a half-used one half
    stalls: dict[str, float]  # what compute waited for -> seconds
    read: int  # bytes of the store
    written: int
    work: tuple[Done, ...]
    asked: tuple[Asked, ...]  # in order
