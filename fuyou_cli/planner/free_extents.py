"""Decides which generations a run commits, and therefore which places of the store may be overwritten.

A committed generation is named by a manifest on stable storage. The generation at which a run begins is committed at its start
(0, or the one it resumes from), then every `every`-th. The update to a committed generation moves its stage to the next place
of its ring (`spec.plan.Ring`), as soon as no manifest that is still needed names what lies there. Generations between commits
are updated in place. What was committed last is never touched.

`in_place`: every stage has its own places, usually two, and moves on once its last committed generation is durable. `redo`:
stages share places, and the gradients make a step durable. Stages then move one after the other to places that other stages
have left, each as soon as a manifest says so. After a crash the remaining stages are updated again.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..spec.plan import Ring

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


def left_before(ring: Ring, turn: int) -> tuple[int, int]:
    """Returns which stage was in the place that a stage takes after `turn` (its index in the ring), and the lowest turn of that
    stage that a durable manifest must name first."""
    if ring.stages == 1:
        return 0, turn
    if ring.index >= ring.spares:
        return ring.index - ring.spares, turn + 1
    return ring.index + ring.stages - ring.spares, turn
