"""Ends a run within its recipe's limits: `train.max_time` of a process, `offload.ssd_write_limit` of the whole run.

A step is begun only where it would end within both. It is expected to take what the last ones took at most, and to write what
the plan says; bytes are also charged for updates that earlier steps have left to the next forward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING

from ..core.errors import UsageError
from ..core.units import duration, format_time, gb
from ..recipe.fields import format_size
from ..spec.plan import Plan
from .state.stored import TENSORS

if TYPE_CHECKING:
    from ..recipe.schema import Recipe
    from .report import StepReport


class RunLimits:
    """Knows the limits of one process. `begin` comes before its first step, `took` after each."""

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        self._plan, self._seconds, self._bytes = plan, recipe.train.max_time, recipe.offload.ssd_write_limit
        self._interval = (plan.commit_every if plan.has_apart_commits else None) or 1
        self._took: deque[float] = deque(maxlen=self._interval)  # seconds of the last steps, one with a commit among them
        self._first = self._step = self._begin = 0

    def begin(self, done: int, written: int) -> None:
        """Begins behind step `done`. `written`: bytes of the store by the run so far, with its earlier processes."""
        self._first = self._step = done
        self._begin = written

    def took(self, step: StepReport) -> None:
        self._step = step.step
        self._took.append(step.seconds)

    def reached(self, *, seconds: float, written: int) -> str | None:
        """Names the limit that another step would pass, None where it may begin. `seconds`: since the run was opened."""
        return self._time(seconds) or self._writes(written)

    def _time(self, seconds: float) -> str | None:
        following = max(self._took, default=0.0)
        if len(self._took) < self._interval:  # none with a commit was seen
            following += self._plan.predicted.commit_seconds
        if self._seconds is None or seconds + following <= self._seconds:
            return None
        step = f", and the next step may take {duration(following)}" if following else ""
        return f"train.max_time={format_time(self._seconds)}: {duration(seconds)} are over{step}"

    def _writes(self, written: int) -> str | None:
        plan, step = self._plan, written_by_step(self._plan)
        if self._bytes is None:
            return None
        due = self._begin + _written(plan, self._step - self._first, done=self._first)
        if max(written, due) + step + saved_where_it_stops(plan) <= self._bytes:
            return None
        return f"offload.ssd_write_limit={format_size(self._bytes)}: {gb(written)} are written, and a step writes {gb(step)}"


def check_loading(recipe: Recipe, plan: Plan) -> None:
    """Raises UsageError where a new run may not even write what it loads, and one step: it would never come further."""
    most, saved = recipe.offload.ssd_write_limit, saved_where_it_stops(plan)
    step = written_by_step(plan) + saved
    if most is None or loaded(plan) + step <= most:
        return
    raise UsageError(
        f"offload.ssd_write_limit={format_size(most)} is too small: loading the model writes {gb(loaded(plan))}, "
        f"a step{' and saving it' if saved else ''} {gb(step)}",
        hint="raise it, or leave it out",
    )


def loaded(plan: Plan) -> int:
    """Returns the bytes that loading writes, wherever the weights rest later; moments come with the first updates."""
    return sum(stage.weights_at.size for stage in plan.stages)


def written_by_step(plan: Plan) -> int:
    """Returns the bytes that a step writes; where only some are committed, one that is not. Averages are rounded down."""
    predicted = plan.predicted
    if not plan.has_apart_commits or plan.commit_every is None:
        return predicted.written_per_step
    return max(0, predicted.written_per_step - saved_where_it_stops(plan) // plan.commit_every)


def steps_within_writes(plan: Plan, room: int, *, done: int) -> int:
    """Returns how many steps behind step `done` write no more than `room` bytes, with the saving where they end."""
    step, saved = written_by_step(plan), saved_where_it_stops(plan)
    interval = (plan.commit_every if plan.has_apart_commits else None) or 1
    in_one = _written(plan, interval, done=0)
    most = interval * (room // in_one + 2) if in_one else 0
    return bisect_right(range(most), room - step - saved, key=lambda steps: _written(plan, steps, done=done))


def _written(plan: Plan, steps: int, *, done: int) -> int:
    """Returns the bytes that so many steps behind step `done` write, with their commits."""
    every = plan.commit_every if plan.has_apart_commits else None
    commits = (done + steps) // every - done // every if every else 0
    return steps * written_by_step(plan) + commits * saved_where_it_stops(plan)


def saved_where_it_stops(plan: Plan) -> int:
    """Returns the bytes that saving writes beside the updates: what rests in RAM or on the device, unless every step's update
    writes it."""
    if plan.commit_every == 1:
        return 0
    return sum(
        extent.size
        for stage in plan.stages
        for name in TENSORS
        if name != "frozen" and (stage.updated_there or stage.ram(name) is not None)
        if (extent := stage.extent(name, 0)) is not None
    )
