"""What a run may take, looked at before every step: `train.max_time` of a process, `offload.ssd_write_limit` of the whole run.

A step is begun only where it would end within both. What it takes is what the last one took; bytes are also charged for what
earlier steps have left to be written (updates in the next forward), for that is written where a run stops, too.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from ..core.errors import UsageError
from ..core.units import duration, format_time, gb
from ..planner.free_extents import CommitLedger
from ..recipe.fields import format_size
from ..spec.plan import Plan
from .state.stored import TENSORS

if TYPE_CHECKING:
    from ..recipe.schema import Recipe
    from .report import StepReport


class RunLimits:
    """Of one process. `begin` comes before its first step, `took` after each."""

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        self._seconds, self._bytes = recipe.train.max_time, recipe.offload.ssd_write_limit
        self._commits = CommitLedger(every=plan.commit_every)
        self._is_apart = plan.has_apart_commits
        self._late = any(stage.deferred for stage in plan.stages)  # updates, a step behind their gradients
        self._saved = saved_where_it_stops(plan)
        self._planned = written_by_step(plan)
        self._longer = plan.predicted.commit_seconds
        self._first = self._step = self._begin = 0
        self._plain = self._longest = 0.0  # seconds of the last step that commits nothing, and of the last that does
        self._plain_bytes = 0

    def begin(self, done: int, written: int) -> None:
        """`done`: steps; `written`: bytes of the store that the run has written so far, with its earlier
        processes."""
        self._first = self._step = done
        self._begin = written

    def took(self, step: StepReport) -> None:
        self._step = step.step
        if self._commits_in(step.step):
            self._longest = step.seconds
        else:
            self._plain, self._plain_bytes = step.seconds, step.written_bytes

    def reached(self, *, seconds: float, written: int) -> str | None:
        """Which of them another step would pass, for people; None where it may begin. `seconds`: since the process opened the
        run; `written` as in `begin`."""
        return self._time(seconds) or self._writes(written)

    def _commits_in(self, step: int) -> bool:
        """Whether updates in this step write what otherwise rests in RAM, and others do not."""
        late = self._late and step - 1 > self._first and self._commits.is_written(step - 1)
        return self._is_apart and (late or self._commits.is_written(step))

    def _time(self, seconds: float) -> str | None:
        next_one = self._plain
        if self._commits_in(self._step + 1):
            next_one = self._longest or self._plain + self._longer
        if self._seconds is None or seconds + next_one <= self._seconds:
            return None
        known = self._step > self._first
        step = f", and {'a step with a commit' if next_one > self._plain else 'the last step'} took {duration(next_one)}"
        return f"train.max_time={format_time(self._seconds)}: {duration(seconds)} are over{step if known else ''}"

    def _writes(self, written: int) -> str | None:
        if self._bytes is None:
            return None
        step = max(self._plain_bytes, self._planned)
        steps, every = self._step - self._first, self._commits.every
        commits = self._step // every - self._first // every if every and self._is_apart else 0
        due = self._begin + steps * step + commits * self._saved
        left = max(0, due - written)  # for the next forward, or for where the run stops
        if written + left + step + self._saved <= self._bytes:
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
    """Bytes that loading writes, wherever the weights rest later: moments are zero and come with the first updates."""
    return sum(stage.weights_at.size for stage in plan.stages)


def written_by_step(plan: Plan) -> int:
    """Bytes by one that is not committed, where some are and others are not; else by any. Averages are rounded down, stage by
    stage: nothing is left where a commit alone writes."""
    predicted = plan.predicted
    if not plan.has_apart_commits or plan.commit_every is None:
        return predicted.written_per_step
    return max(0, predicted.written_per_step - saved_where_it_stops(plan) // plan.commit_every)


def steps_within_writes(plan: Plan, room: int, *, done: int) -> int:
    """How many steps from step `done` on write no more than `room` bytes, with the saving where they end."""
    step, saved, every = written_by_step(plan), saved_where_it_stops(plan), plan.commit_every
    if not plan.has_apart_commits or every is None:
        return max(0, room - saved) // step if step else 0

    def written(steps: int) -> int:
        commits = (done + steps) // every - done // every
        return steps * step + saved * (commits + ((done + steps) % every > 0))

    most = every * (room // (every * step + saved) + 2)
    return max(0, bisect_right(range(most), room, key=written) - 1)


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
