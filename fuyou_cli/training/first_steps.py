"""Whether anything fails to move in a run's first steps: a parameter that no gradient reaches, a stage whose bits stay.

It costs nothing: squares of gradients are summed tensor by tensor anyway, and a committed stage has sums of its bits. A rate
that is still low in warm-up is no reason for the first, which looks at gradients; for the second all that counts is bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..spec.model import ModelSpec
from .rates import LearningRate
from .state.stored import Manifest, StoredStage

FIRST = 3  # steps
_NAMED = 5  # of what is found


class FirstSteps:
    """Of a run that has not got beyond them. `say` hears of each kind at most once."""

    def __init__(self, model: ModelSpec, *, say: Callable[[str], None]) -> None:
        self._model, self._say = model, say
        self._looks_at_gradients = self._looks_at_bits = False
        self._steps = 0
        self._early: Manifest | None = None
        self._rates: LearningRate | None = None

    def begin(self, done: int, rates: LearningRate) -> None:
        """The process trains from step `done` on."""
        self._looks_at_gradients = self._looks_at_bits = done < FIRST
        self._rates = rates

    def step(self, reached: set[str], *, skipped: bool) -> None:
        """One step more. `reached`: tensors that have had a gradient other than zero so far."""
        if not self._looks_at_gradients or skipped:
            return
        self._steps += 1
        if self._steps < FIRST:
            return
        self._looks_at_gradients = False
        names = dict.fromkeys(tensor.name for stage in self._model.stages for tensor in stage.tensors)
        if unreached := [name for name in names if name not in reached]:
            self._say(f"note: {_some(unreached)} got no gradient in {FIRST} steps, so nothing is trained there")

    def committed(self, manifest: Manifest) -> None:
        """A step's state is being committed."""
        if not self._looks_at_bits or not manifest.step:
            return
        if self._early is None:  # not of step 0: moments and remainders may not be there yet
            self._early = manifest
        if manifest.step - self._early.step < FIRST - 1:
            return
        early, self._early, self._looks_at_bits = self._early, None, False
        if manifest.skipped != early.skipped or not self._has_rate(early.step + 1, manifest.step):
            return
        same = [stage.name for stage, old in zip(manifest.stages, early.stages, strict=True) if _same(stage, old)]
        if same:
            self._say(
                f"note: not a bit of {_some(same)} has changed from step {early.step} to step {manifest.step}: "
                "is optimizer.lr too small?"
            )

    def _has_rate(self, first: int, last: int) -> bool:
        assert self._rates is not None
        return any(self._rates.at(step) > 0 for step in range(first, last + 1))


def _same(stage: StoredStage, old: StoredStage) -> bool:
    """Whether the masters are those of before, to the bit; where their sums are not known they are taken for changed."""
    if stage.weights is None or old.weights is None or (stage.remainder is None) != (old.remainder is None):
        return False
    remainders = stage.remainder is None or (old.remainder is not None and stage.remainder.sum == old.remainder.sum)
    return stage.params > 0 and stage.weights.sum == old.weights.sum and remainders


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED:,} others" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
