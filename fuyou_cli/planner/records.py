"""Describes one stage's record in the residency ledger, and what whoever runs a step gives to its ledgers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ..spec.plan import Span

ON_DEVICE = Span(offset=0, size=0)  # stands for the place of weights that rest on the device alone, whose ledger this is too


class Transfers(Protocol):
    """Moves bytes between arena and store, both named by offsets. Every submit returns a ticket."""

    def read(self, arena_offset: int, store_offset: int, size: int, *, priority: int = 0, label: int = 0) -> int: ...

    def write(self, arena_offset: int, store_offset: int, size: int, *, priority: int = 0, label: int = 0) -> int: ...

    def poll(self, ticket: int) -> object | None:
        """Returns what the request ended with, once; None while it is under way."""
        ...


class Runner(Protocol):
    """Stands for whoever runs the step that the ledger is kept for."""

    def update(self, record: Record) -> int:
        """Starts AdamW of the record's stage with what is `due`; its ticket."""
        ...

    def updated(self, record: Record, result: Any) -> None:
        """Hears that the update is over; raises where the step cannot go on."""
        ...

    def rested(self, record: Record, result: Any) -> None:
        """Hears that the stage's gradients rest on the ssd."""
        ...

    def completed(self, generation: int) -> None:
        """Hears that every stage has reached this generation, which is to be committed; none goes on before it is durable."""
        ...

    def durable(self, stage: int) -> int:
        """Returns the turn at which the newest manifest names the stage; raises where committing failed."""
        ...

    def blocked(self) -> None:
        """Hears that an update waits until a manifest names what other stages have come to."""
        ...

    def wait(self, done: Callable[[], bool], cause: str) -> None:
        """Returns when `done()`, moving everything that can move. What compute waited is a stall of `cause`."""
        ...


@dataclass(slots=True)
class Record:
    """Describes one stage. At most one of `fetch` and `update` is under way."""

    stage: int
    generation: int = 0  # of the weights, once `update` has finished
    turn: int = 0  # of the stage's ring: where this generation rests
    sums: Any = None  # of what was written there (the runner's)
    gradients_sum: int | None = None  # of gradients that rest on the ssd to make their step durable
    zero_moments: bool = True  # momentum and variance were never written
    zero_remainder: bool = True
    span: Span | None = None  # where the weights are in the arena
    slotted: bool = False  # span is a slot, not a home
    fetch: int | None = None
    update: int | None = None
    due: Any = None  # what a deferred update needs (the runner's), to run before the next visit's compute
    held: int = 0  # visits, prefetches and downloads that need the span
    kept: bool = False  # the schedule keeps the span for the stage's next visit
    gradient_slot: Span | None = None  # freed when the update has finished
    gradient_write: int | None = None  # gradients on their way to rest on the ssd
    gradient_read: int | None = None  # and back, to be summed on
    gradients: Literal["summed", "resting", "resumed"] = "summed"  # at home since `rest_gradients`; wanted back since
