"""Decides which generations a run commits, and therefore which places of the store may be overwritten.

A committed generation is named by a manifest on stable storage. The generation at which a run begins is committed at its start
(0, or the one it resumes from), then every `every`-th. The update to a committed generation moves its stage to the other place
of its pair (`spec.plan.ExtentPair`), as soon as its last committed generation is durable. Generations between commits are
updated in place. What was committed last is never touched.
"""

from __future__ import annotations

from dataclasses import dataclass

FOREVER = 1 << 62  # a turn that is never reached: nothing waits for it


@dataclass(slots=True)
class CommitLedger:
    """Knows which generations are committed: `base`, where a run begins, and each `every`-th (None: no other until the run
    ends)."""

    every: int | None
    base: int = 0

    def is_named(self, generation: int) -> bool:
        """Tells whether a manifest names this generation before the run continues from it."""
        return generation == self.base or self.is_written(generation)

    def is_written(self, generation: int) -> bool:
        """Tells whether the update to this generation also writes what rests in RAM."""
        return self.every is not None and generation % self.every == 0

    def next_turn(self, turn: int, generation: int) -> int:
        """Returns the turn of the generation after this one."""
        return turn + 1 if self.is_named(generation) else turn
