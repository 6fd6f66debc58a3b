"""The learning rate of every step as the recipe says it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.errors import UsageError
from ..engine.updates import LearningRate

if TYPE_CHECKING:
    from ..recipe.schema import Recipe


def learning_rate(recipe: Recipe, total_steps: int) -> LearningRate:
    """Of a run of `total_steps`. Raises UsageError for a warm-up that does not end within it."""
    schedule = recipe.lr_scheduler
    warmup = schedule.warmup_steps
    if warmup is None:
        warmup = round((schedule.warmup_ratio or 0.0) * total_steps)
    if warmup > total_steps:
        raise UsageError(
            f"lr_scheduler.warmup_steps: a warm-up of {warmup:,} steps does not end within the run's {total_steps:,}",
            hint="lower it, raise train.epochs, or write lr_scheduler.warmup_ratio",
        )
    return LearningRate(
        name=schedule.name,
        peak=recipe.optimizer.lr,
        warmup_steps=warmup,
        total_steps=total_steps,
        min_ratio=schedule.min_lr_ratio,
        decay_steps=max(1, total_steps // 10) if schedule.name == "wsd" else 0,
    )
