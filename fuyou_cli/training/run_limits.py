"""Ends a run within its recipe's limits: `train.max_time` per process, `offload.ssd_write_limit` for the whole run.

A step begins only if it would end within both. Its expected time is the longest of the last steps. Its expected writes are the
plan's, plus those of updates that earlier steps left to the next forward.
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
    """Checks the limits of one process. Call `begin` before its first step, and `took` after each step."""

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        self._plan, self._seconds, self._bytes = plan, recipe.train.max_time, recipe.offload.ssd_write_limit
        self._interval = (plan.commit_every if plan.has_apart_commits else None) or 1
        self._took: deque[float] = deque(maxlen=self._interval)  # seconds of the last steps, including one with a commit
        self._first = self._step = self._begin = 0

    def begin(self, done: int, written: int) -> None:
        """Begins after step `done`. `written`: bytes that the run has written to the store so far, in all its processes."""
        self._first = self._step = done
        self._begin = written

    def took(self, step: StepReport) -> None:
        self._step = step.step
        self._took.append(step.seconds)

    def reached(self, *, seconds: float, written: int) -> str | None:
        """Returns a message with the limit that another step would exceed, or None if the step may begin. `seconds`: since the
        run was opened."""
        return self._time(seconds) or self._writes(written)

    def _time(self, seconds: float) -> str | None:
        following = max(self._took, default=0.0)
        if len(self._took) < self._interval:  # no step with a commit was seen yet
            following += self._plan.predicted.commit_seconds
        if self._seconds is None or seconds + following <= self._seconds:
            return None
        step = f", and the next step may take {duration(following)}" if following else ""
        return f"train.max_time={format_time(self._seconds)}: {duration(seconds)} have passed{step}"

    def _writes(self, written: int) -> str | None:
        plan, step = self._plan, written_by_step(self._plan)
        if self._bytes is None:
            return None
        due = self._begin + _written(plan, self._step - self._first, done=self._first)
        if max(written, due) + step + saved_where_it_stops(plan) <= self._bytes:
            return None
        return f"offload.ssd_write_limit={format_size(self._bytes)}: {gb(written)} were written, and a step writes {gb(step)}"


def check_loading(recipe: Recipe, plan: Plan) -> None:
    """Raises UsageError if a new run may not even write the loaded model and one step: it could never make progress."""
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
    """Returns the bytes that loading writes, wherever the weights rest later. Moments are written by the first updates."""
    frozen = sum(stage.frozen_extent.size for stage in plan.stages if stage.frozen_extent is not None)
    return frozen + sum(stage.weights_at.size for stage in plan.stages)


def written_by_step(plan: Plan) -> int:
    """Returns the bytes that a step writes. If only some steps are committed, returns those of a step that is not. Averages are
    rounded down."""
    predicted = plan.predicted
    if not plan.has_apart_commits or plan.commit_every is None:
        return predicted.written_per_step
    return max(0, predicted.written_per_step - saved_where_it_stops(plan) // plan.commit_every)


def steps_within_writes(plan: Plan, room: int, *, done: int) -> int:
    """Returns how many steps after step `done` write at most `room` bytes, including the save at the end."""
    step, saved = written_by_step(plan), saved_where_it_stops(plan)
    interval = (plan.commit_every if plan.has_apart_commits else None) or 1
    in_one = _written(plan, interval, done=0)
    most = interval * (room // in_one + 2) if in_one else 0
    return bisect_right(range(most), room - step - saved, key=lambda steps: _written(plan, steps, done=done))


def _written(plan: Plan, steps: int, *, done: int) -> int:
    """Returns the bytes that this many steps after step `done` write, with their commits."""
    every = plan.commit_every if plan.has_apart_commits else None
    commits = (done + steps) // every - done // every if every else 0
    return steps * written_by_step(plan) + commits * saved_where_it_stops(plan)


def saved_where_it_stops(plan: Plan) -> int:
    """Returns the bytes that saving writes beside the updates: tensors that rest in RAM or on the device, unless every step's
    update writes them."""
    if plan.commit_every == 1:
        return 0
    return sum(
        extent.size
        for stage in plan.stages
        for name in TENSORS
        if name != "frozen" and (stage.updated_there or stage.ram(name) is not None)
        if (extent := stage.extent(name, 0)) is not None
    )
