"""Defines `Record`, one stage's record in the residency ledger, and the interfaces that a ledger's runner provides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..spec.plan import Span

# Stands for the span of weights that rest only on the device; the ledger tracks these as well.
ON_DEVICE = Span(offset=0, size=0)


class Transfers(Protocol):
    """Moves bytes between arena and store, both named by offsets. Every submit returns a ticket."""

    def read(self, arena_offset: int, store_offset: int, size: int, *, priority: int = 0, label: int = 0) -> int: ...

    def write(self, arena_offset: int, store_offset: int, size: int, *, priority: int = 0, label: int = 0) -> int: ...

    def poll(self, ticket: int) -> object | None:
        """Returns the request's result, once; None while it is under way."""
        ...


class Runner(Protocol):
    """Runs the step that the ledger keeps track of: for real (the executor) or on a virtual machine (the simulator)."""

    def update(self, record: Record) -> int:
        """Starts AdamW for the record's stage with what is `due`. Returns its ticket."""
        ...

    def updated(self, record: Record, result: Any) -> None:
        """Takes note that the update has ended. Raises if the step cannot go on."""
        ...

    def join(self, record: Record) -> None:
        """Copies trained weights from their own home in RAM into the record's slot, in front of the frozen ones."""
        ...

    def completed(self, generation: int) -> None:
        """Takes note that every stage has reached this generation, which will be committed. No stage goes on before it is
        durable."""
        ...

    def durable(self, stage: int) -> int:
        """Returns the turn at which the newest manifest names the stage. Raises if committing failed."""
        ...

    def wait(self, done: Callable[[], bool], cause: str) -> None:
        """Returns when `done()` is true; meanwhile moves everything that can move. The time that compute waits is a stall of
        `cause`."""
        ...


@dataclass(slots=True)
class Record:
    """Holds what is known of one stage. Fetches and an update are never under way together, unless trained weights have
    a home of their own."""

    stage: int
    generation: int = 0  # generation of the weights, once `update` has finished
    turn: int = 0  # which place of the stage's pair this generation rests in
    sums: Any = None  # checksums of what was written there; the runner's type
    zero_moments: bool = True  # momentum and variance were never written
    zero_remainder: bool = True
    span: Span | None = None  # where the weights are in the arena
    slotted: bool = False  # the span is a slot, not a home
    fetches: list[int] = field(default_factory=list)  # tickets, one for each bank
    update: int | None = None
    due: Any = None  # what a deferred update needs (the runner's type); it runs before the next visit computes
    held: int = 0  # visits, prefetches and downloads that need the span
    kept: bool = False  # the schedule keeps the span for the stage's next visit
    gradient_slot: Span | None = None  # freed when the update has finished
    gradient_write: int | None = None  # ticket of gradients being written to the ssd
    gradient_read: int | None = None  # ticket of gradients being read back, to continue their sum
    # "resting" after `rest_gradients`, "resumed" once their sum continues
    gradients: Literal["summed", "resting", "resumed"] = "summed"
