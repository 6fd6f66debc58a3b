"""Walks through the visits in order and prefetches for the next ones.

Each visit takes its slots first. Then it starts what the next visits need, in order, as long as slots are free. So a later
visit never holds a slot that an earlier one waits for. Once a visit has its own slots, prefetching goes on even while it waits
for its data.
"""

from __future__ import annotations

from collections.abc import Callable

from .ledgers import BoundaryLedger, Residency
from .schedule import Schedule, Visit

_BEYOND = 6  # visits beyond the lookahead that may be prefetched if slots are free. More made no simulated step faster.


class Lookahead:
    """Runs the current visit and prefetches for the `plan.lookahead` visits after it, also across the end of the step. `tick`
    moves everything that can move and calls `advance`."""

    def __init__(
        self, *, schedule: Schedule, residency: Residency, boundaries: BoundaryLedger, tick: Callable[[], None]
    ) -> None:
        self.visits, self._residency, self._boundaries, self._tick = schedule.visits, residency, boundaries, tick
        self._needs_slot = [residency.needs_slot(visit) for visit in schedule.visits]
        self._distance = residency.plan.lookahead
        self._reach = max(self._distance, min(self._distance + _BEYOND, len(schedule.visits) - 1))
        self.prefetched: set[int] = set()
        self._last_step = False
        self.cursor = -1
        self._beyond = 0  # the first visit beyond the lookahead that is still to be fetched for
        # What the visit under way has: slots for weights and boundary, a slot for gradients, weights on the device.
        self._settled = self._summing = self._uploaded = False

    def begin_step(self, *, last: bool) -> None:
        """Begins a step. `last`: no step follows, so nothing is prefetched for it."""
        self.cursor, self._last_step, self._beyond = -1, last, self._distance

    def enter(self, stash: Callable[[Visit], None]) -> Visit:
        """Returns the next visit once it has its slots and its weights are there. `stash` keeps its input for backward."""
        self.cursor += 1
        self._beyond = self.cursor + self._distance + 1
        visit = self.visits[self.cursor]
        summed = self._owner(visit) if visit.sum_gradients else None
        self._settled, self._summing, self._uploaded = False, summed is None, False
        self._take_slots(visit, stash)
        self._settled = True
        self._tick()
        # Only once the gradients of the last step were used: they may still lie where the new ones will be summed.
        if summed is not None and self._residency.is_current(summed):
            self._take_sum(visit, summed)
        self._residency.acquire(visit)
        if summed is not None and not self._summing:
            self._take_sum(visit, summed)
        return visit

    def on_device(self) -> None:
        """Notes that the visit's weights are where it computes. The next visit's weights may now be uploaded."""
        self._uploaded = True
        self._tick()

    def _take_slots(self, visit: Visit, stash: Callable[[Visit], None]) -> None:
        """Takes the slots for weights and boundary. Their contents are there or on the way."""
        if visit.index in self.prefetched:
            self.prefetched.remove(visit.index)
        else:
            self._residency.take_slot(visit)
        if visit.stash:
            stash(visit)
        if visit.take:
            self._residency.wait_until(lambda: self._boundaries.try_prefetch(visit.stage), "a slot for a boundary")

    def _take_sum(self, visit: Visit, owner: int) -> None:
        """Takes a place for the owner's gradient sum. A resumed sum is already being read."""
        if visit.resume:
            self._residency.wait_until(lambda: self._residency.try_resume_gradients(owner), "a slot for gradients")
        elif self._residency.model.stages[owner].trained:
            self._residency.acquire_gradients(owner)
        self._summing = True

    def advance(self, nearest: Callable[[Visit, bool], None]) -> None:
        """Starts what can be started. Once the weights of the very next visit are being read and the device is ready for them,
        calls `nearest` with that visit and whether it is in the next step."""
        if self._settled and self._start_near(nearest):
            self._fetch_beyond()

    def _start_near(self, nearest: Callable[[Visit, bool], None]) -> bool:
        """Starts what the visits within the lookahead need. Returns whether all of it has started."""
        resuming = self._summing  # so far; a visit that begins a new sum must not lose its slot to a later visit
        count = len(self.visits)
        for ahead in range(1, self._distance + 1):
            index = self.cursor + ahead
            next_step = index >= count
            if next_step:
                if self._last_step:
                    return False
                index -= count
                if index >= count:  # a rank may have fewer visits than it looks ahead
                    break
            visit = self.visits[index]
            if visit.sum_gradients:
                resuming = resuming and visit.resume and self._residency.try_resume_gradients(self._owner(visit))
            if visit.take and visit.stage in self._boundaries.kept and not self._boundaries.try_prefetch(visit.stage):
                return False
            if index in self.prefetched:
                if ahead == 1 and self._uploaded:  # this visit has its span on the device, so the next may take the other
                    nearest(visit, next_step)
                continue
            if not self._residency.try_prefetch(visit):
                return False
            self.prefetched.add(index)
        return True

    def _fetch_beyond(self) -> None:
        """Fetches weights for visits further ahead in the step, in order. Weights that a nearer visit still has in a slot are
        read again later unless the plan keeps them. So a step reads what the plan says, or less where an update still holds
        a slot whose weights are needed again."""
        end = min(self.cursor + self._reach + 1, len(self.visits))
        while self._beyond < end:
            index = self._beyond
            if index not in self.prefetched and self._needs_slot[index]:
                visit = self.visits[index]
                if (visit.fetch and self._residency.in_slot(visit)) or not self._residency.try_prefetch(visit):
                    return
                self.prefetched.add(index)
            self._beyond += 1

    def _owner(self, visit: Visit) -> int:
        """Returns the stage whose gradients the visit sums."""
        return visit.stage if visit.owner is None else visit.owner

    def pause(self) -> None:
        """Starts nothing more until the next visit."""
        self._settled = False

    def give_up(self) -> None:
        """Releases what was started and is no longer needed."""
        for index in sorted(self.prefetched):
            self._residency.release(self.visits[index])
        self.prefetched.clear()

    def forget(self) -> None:
        """Forgets a step that was given up. The caller frees everything it held."""
        self.prefetched.clear()
