"""Computes the learning rate of every step from the recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.errors import UsageError

if TYPE_CHECKING:
    from ..recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """Computes a linear warm-up, then a constant, linear, cosine or wsd schedule (constant, then linear decay over
    `decay_steps`).

    The step after the warm-up has the peak: step s has transformers' factor at index s - 1, so no step of a run has the rate 0,
    and the least rate is what a step after the last would have. Runs that builds before this rule began keep theirs
    (`peak_after_warmup` False: index s), whose last step has the least rate.
    """

    name: str
    peak: float
    warmup_steps: int
    total_steps: int
    min_ratio: float
    decay_steps: int = 0
    peak_after_warmup: bool = True

    def at(self, step: int) -> float:
        """Returns the rate of step `step` (1 is the first)."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        index = step - 1 if self.peak_after_warmup else step
        progress = min(1.0, (index - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        if self.name == "constant":
            factor = 1.0
        elif self.name == "linear":
            factor = 1.0 - (1.0 - self.min_ratio) * progress
        elif self.name == "cosine":
            factor = self.min_ratio + (1.0 - self.min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
        else:
            into_decay = index - (self.total_steps - self.decay_steps)
            decayed = max(0.0, into_decay / self.decay_steps) if self.decay_steps else 0.0
            factor = 1.0 - (1.0 - self.min_ratio) * min(1.0, decayed)
        return self.peak * factor


def learning_rate(recipe: Recipe, total_steps: int, *, peak_after_warmup: bool = True) -> LearningRate:
    """Returns the learning rate of a run of `total_steps`. `peak_after_warmup`: what a saved run began with. Raises UsageError
    if the warm-up is longer than the run."""
    schedule, warmup = recipe.lr_scheduler, recipe.lr_scheduler.warmup_steps
    if warmup is None:
        warmup = round((schedule.warmup_ratio or 0.0) * total_steps)
    if warmup > total_steps:
        raise UsageError(
            f"lr_scheduler.warmup_steps: a warm-up of {warmup:,} steps is longer than the run's {total_steps:,} steps",
            hint="lower it, raise train.epochs, or write lr_scheduler.warmup_ratio",
        )
    decay = max(1, total_steps // 10) if schedule.name == "wsd" else 0
    return LearningRate(
        name=schedule.name,
        peak=recipe.optimizer.lr,
        warmup_steps=warmup,
        total_steps=total_steps,
        min_ratio=schedule.min_lr_ratio,
        decay_steps=min(decay, total_steps - warmup) if peak_after_warmup else decay,
        peak_after_warmup=peak_after_warmup,
    )
