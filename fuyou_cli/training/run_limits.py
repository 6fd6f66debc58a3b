"""What a run may take, looked at before every step: `train.max_time` of a process, `offload.ssd_write_limit` of the whole run.

A step is begun only where it would end within both. What it takes is what the last one took; bytes are also charged for what
earlier steps have left to be written (updates in the next forward), for that is written where a run stops, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.errors import UsageError
from ..core.units import duration, format_time, gb
from ..recipe.fields import format_size
from ..spec.plan import Plan
from .manifest import TENSORS

if TYPE_CHECKING:
    from ..recipe.schema import Recipe
    from .report import StepReport


class RunLimits:
    """Of one process. `begin` comes before its first step, `took` after each."""

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        self._seconds, self._bytes = recipe.train.max_time, recipe.offload.ssd_write_limit
        self._planned = plan.predicted.written_per_step
        self._saved = saved_where_it_stops(plan)
        self._steps, self._begin = 0, 0
        self._last_seconds, self._last_bytes = 0.0, 0

    def begin(self, written: int) -> None:
        """`written`: bytes of the store that the run has written so far, with its earlier processes."""
        self._begin = written

    def took(self, step: StepReport) -> None:
        self._steps += 1
        self._last_seconds, self._last_bytes = step.seconds, step.written_bytes

    def reached(self, *, seconds: float, written: int) -> str | None:
        """Which of them another step would pass, for people; None where it may begin. `seconds`: since the process opened the
        run; `written` as in `begin`."""
        return self._time(seconds) or self._writes(written)

    def _time(self, seconds: float) -> str | None:
        if self._seconds is None or seconds + self._last_seconds <= self._seconds:
            return None
        step = f", and the last step took {duration(self._last_seconds)}" if self._steps else ""
        return f"train.max_time={format_time(self._seconds)}: {duration(seconds)} are over{step}"

    def _writes(self, written: int) -> str | None:
        if self._bytes is None:
            return None
        step = max(self._last_bytes, self._planned)
        left = max(0, self._begin + self._steps * step - written)  # for the next forward, or for where the run stops
        if written + left + step + self._saved <= self._bytes:
            return None
        return f"offload.ssd_write_limit={format_size(self._bytes)}: {gb(written)} are written, and a step writes {gb(step)}"


def check_loading(recipe: Recipe, plan: Plan) -> None:
    """Raises UsageError where a new run may not even write what it loads, and one step: it would never come further."""
    most, saved = recipe.offload.ssd_write_limit, saved_where_it_stops(plan)
    step = plan.predicted.written_per_step + saved
    if most is None or loaded(plan) + step <= most:
        return
    raise UsageError(
        f"offload.ssd_write_limit={format_size(most)} allows no step: loading the model writes {gb(loaded(plan))}, "
        f"a step{' and saving it' if saved else ''} {gb(step)}",
        hint="raise it, or leave it out",
    )


def loaded(plan: Plan) -> int:
    """Bytes that loading writes, wherever the weights rest later: moments are zero and come with the first updates."""
    return sum(stage.weights_at.size for stage in plan.stages)


def saved_where_it_stops(plan: Plan) -> int:
    """Bytes that saving writes beside the updates: what rests in RAM, unless every step's update writes that too."""
    if plan.commit_every == 1:
        return 0
    return sum(
        extent.size
        for stage in plan.stages
        for name in TENSORS
        if getattr(stage, f"{name}_ram") is not None and (extent := stage.extent(name, 0)) is not None
    )
