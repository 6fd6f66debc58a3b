"""Holds samples of an entry back from training (`dataset.eval_fraction`), as seed, entry and number of each sample say."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass
from fractions import Fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Names the samples held back, or the others. A worker is asked for one part in its own process."""

    fraction: float
    seed: int
    held: bool

    def takes(self, entry: int, number: int) -> bool:
        """Tells whether a sample of an entry of the recipe is in this part. Both count from 0."""
        return is_held(self.fraction, seed=self.seed, entry=entry, number=number) == self.held

    def asked(self) -> dict[str, object]:
        """Returns it as part of a request."""
        return {"part": asdict(self)}


def is_held(fraction: float, *, seed: int, entry: int, number: int) -> bool:
    """Tells whether a sample is held back: one of every 1/`fraction`, drawn among these. So of any first samples as many are
    held as the fraction says, to within one, and none depends on those after it."""
    share = Fraction(str(fraction))
    run = math.ceil((number + 1) * share) - 1
    first, end = math.floor(run / share), math.floor((run + 1) / share)
    drawn = hashlib.sha256(f"{seed} {entry} {run}".encode()).digest()
    return number == first + int.from_bytes(drawn[:8], "little") % (end - first)
