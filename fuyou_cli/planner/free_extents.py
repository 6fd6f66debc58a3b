"""Tells which generations a run commits, and so which places of the store may be written over.

A committed generation is named by a manifest on stable storage. Generation 0, or the one a run was resumed at, is named when
it begins; from then on every `every`-th is. The update of a named generation moves its stage to the next place of its ring
(`spec.plan.Ring`), as soon as no manifest that is needed names what lies there. Any other generation is nobody's but the
run's, and is updated in place: what was committed last is never touched (design.md, section 4).

`in_place`: every stage has places of its own, two as a rule, and moves on once its last generation is durable. `redo`: stages
share places. What makes a step durable are its gradients; then its stages move one after the other to where others were, each
as soon as a manifest says that those have moved, and a crash updates the rest again.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..spec.plan import Ring

FOREVER = 1 << 62  # a turn that is never come to: nothing waits


@dataclass(slots=True)
class CommitLedger:
    """Knows which generations are committed: `base`, where a run begins, and each `every`-th (None: no other until its end)."""

    every: int | None
    base: int = 0

    def is_named(self, generation: int) -> bool:
        """Tells whether a manifest names this generation before the run goes on from it."""
        return generation == self.base or self.is_written(generation)

    def is_written(self, generation: int) -> bool:
        """Tells whether what rests in RAM is written too by the update that makes this generation."""
        return self.every is not None and generation % self.every == 0

    def next_turn(self, turn: int, generation: int) -> int:
        """Returns the turn of the generation after this one."""
        return turn + 1 if self.is_named(generation) else turn


def left_before(ring: Ring, turn: int) -> tuple[int, int]:
    """Tells whose place a stage moves to behind `turn`: the index of the stage in the ring that was there last, and the turn
    that a durable manifest must name of it, at least."""
    if ring.stages == 1:
        return 0, turn
    if ring.index >= ring.spares:
        return ring.index - ring.spares, turn + 1
    return ring.index + ring.stages - ring.spares, turn
