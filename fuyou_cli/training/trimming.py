"""Gives the heap's free pages back to the system when the plan's peak needs it, and no earlier.

Every page given back is faulted in again, which takes a small model a tenth of its time. A visit like the one before it (the
next block of the same pass) finds the holes that one left, and reaches what that one reached and a little more. What a visit
really reached is asked of the kernel, so that what creeps up is seen before it is too much.
"""

from __future__ import annotations

from collections.abc import Callable

from ..planner.boundary_layout import kept_bytes
from ..planner.schedule import Visit
from ..spec.model import ModelSpec
from ..spec.plan import Plan

_CREEP = 4  # a visit reaches what one like it reached, and this part of what compute is charged with more at most


class Trimming:
    """Trims one run's heap. `now`: bytes the process has; `reached`: at most since asked last; `trim` gives free ones back, and
    hears whether what follows counts on large blocks being mapped on their own."""

    def __init__(
        self, *, model: ModelSpec, plan: Plan, now: Callable[[], int], reached: Callable[[], int], trim: Callable[[bool], None]
    ) -> None:
        self._model, self._plan, self._now, self._reached, self._trim = model, plan, now, reached, trim
        self._compute = sum(line.size for line in plan.memory if line.what == "compute" and line.tier == "cpu")
        # How far free pages may pile up: what a visit takes is known to about a fifth, holes being what they are.
        self._most = plan.predicted.cpu_peak - self._compute // 5
        self._most_alike = plan.predicted.cpu_peak - self._compute // _CREEP
        on_host = plan.device != "cuda"
        self._hungriest = max(stage.backward_peak for stage in model.stages) if on_host else 0
        self._next = 0  # bytes that a micro-batch of the visit under way takes beside the holes of the one before it

    def between_micro_batches(self) -> None:
        """Trims where the next one has no room: it finds the holes of the one before, but for what is mapped on its own."""
        if self._now() + self._next > self._most:
            self._trim(self._next > 0)

    def between_visits(self, before: Visit, after: Visit) -> None:
        """Trims where the next visit has no room: unless it is like the one before, it may find no hole that it can use. (To
        count on that without looking at what was reached got a run killed: scripts/results/TRIED.md.)"""
        reached = self._reached()
        if self._shape(before) == self._shape(after):
            room = reached <= self._most_alike
        else:
            room = self._now() + self._takes(after) <= self._most
        if not room:
            self._trim(self._peaks(after)[1] > 0)
        self._next = self._takes_again(after)

    def _shape(self, visit: Visit) -> tuple[object, ...]:
        """Returns what is equal for visits that take the same blocks."""
        stage = self._model.stages[visit.stage]
        kept = kept_bytes(stage, self._plan.stages[visit.stage].kept)
        return visit.phase, stage.kind, stage.params, stage.forward_peak, stage.backward_peak, kept

    def _takes_again(self, visit: Visit) -> int:
        """Returns the bytes beside the holes of a like micro-batch: all where most is mapped, as of a head's logits."""
        peak, mapped = self._peaks(visit)
        if not self._hungriest or not mapped:
            return 0
        return self._takes(visit) if 2 * mapped > peak else mapped

    def _takes(self, visit: Visit) -> int:
        """Returns the most bytes that it takes of the host's."""
        beside = self._compute - self._hungriest
        return beside + self._peaks(visit)[0] if self._hungriest else beside

    def _peaks(self, visit: Visit) -> tuple[int, int]:
        """Returns the bytes of one micro-batch, and how many of them are mapped on their own."""
        stage = self._model.stages[visit.stage]
        if visit.phase in ("forward", "logits"):
            return stage.forward_peak + kept_bytes(stage, self._plan.stages[visit.stage].kept), stage.forward_mapped
        return stage.backward_peak, stage.backward_mapped
