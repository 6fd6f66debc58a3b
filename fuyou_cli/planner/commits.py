"""Which generations a run commits, and so which extents may be written over.

A committed generation is named by a manifest on stable storage. Generation 0, or the one a run was resumed at, is named
when it begins; from then on every `every`-th is. The update of a named generation writes the other extent of each pair, once
the manifest that names it is durable, for the other extent is what the manifest before it names. Any other generation is
nobody's but the run's, and is updated in place: what was committed last is never touched (design.md, section 4).
"""

from __future__ import annotations

from dataclasses import dataclass

PLACES = 2  # extents of each tensor


@dataclass(slots=True)
class CommitLedger:
    """`every`: steps between commits; None: a run is committed where it begins and where it ends. `base`: the generation it
    begins with."""

    every: int | None
    base: int = 0

    def is_named(self, generation: int) -> bool:
        """Whether a manifest names this generation before the run goes on from it."""
        return generation == self.base or self.is_written(generation)

    def is_written(self, generation: int) -> bool:
        """Whether what rests in RAM is written too by the update that makes this generation."""
        return self.every is not None and generation % self.every == 0

    def next_place(self, place: int, generation: int) -> int:
        """Where the generation after this one is written, which rests in `place`."""
        return (place + 1) % PLACES if self.is_named(generation) else place

    def may_follow(self, generation: int, durable: int) -> bool:
        """Whether the update of this generation may begin. `durable`: the newest one that a manifest names."""
        return durable >= generation or not self.is_named(generation)
