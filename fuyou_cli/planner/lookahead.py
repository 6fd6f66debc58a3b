"""What the next visits need is started before they come, in order, as far as slots are free."""

from __future__ import annotations

from collections.abc import Callable

from .boundaries import BoundaryLedger
from .residency import Residency
from .schedule import Schedule, Visit


class Lookahead:
    """Prefetches for the `plan.lookahead` visits behind the one under way, over the step's end as well."""

    def __init__(self, *, schedule: Schedule, residency: Residency, boundaries: BoundaryLedger) -> None:
        self._visits, self._residency, self._boundaries = schedule.visits, residency, boundaries
        self._distance = residency.plan.lookahead
        self._started: set[int] = set()

    def taken(self, visit: Visit) -> bool:
        """Whether the visit's weights were started for; its turn has come."""
        started = visit.index in self._started
        self._started.discard(visit.index)
        return started

    def advance(self, cursor: int, *, last_step: bool, nearest: Callable[[Visit, bool], None]) -> None:
        """Starts what can be started for the visits behind `cursor`. `nearest` hears of the very next visit, once its
        weights are on their way, and whether it is in the next step."""
        resuming = True  # so far; a visit that begins a new sum must not find its slot taken by one behind it
        for ahead in range(1, self._distance + 1):
            index, next_step = cursor + ahead, False
            if index >= len(self._visits):
                if last_step:
                    return
                index, next_step = index - len(self._visits), True
            visit = self._visits[index]
            resuming = resuming and visit.resume and self._residency.try_resume_gradients(visit.stage)
            if visit.take and visit.stage in self._boundaries.kept and not self._boundaries.try_prefetch(visit.stage):
                return
            if index in self._started:
                if ahead == 1:
                    nearest(visit, next_step)
                continue
            if not self._residency.try_prefetch(visit):
                return
            self._started.add(index)

    def give_up(self) -> None:
        """What was started for is not needed: the stages let go of it."""
        for index in sorted(self._started):
            self._residency.release(self._visits[index])
        self._started.clear()

    def forget(self) -> None:
        """The step was given up; whoever says so lets go of everything."""
        self._started.clear()
