"""Watches the process's memory, and gives the heap's free pages back to the system when the plan's peak needs it, not earlier.

Every page given back must be faulted in again, which can cost a small model a tenth of its time. A visit like the one before it
(the next block of the same pass) finds the free pages that the other left, so it reaches the same peak and a little more. The
kernel tells what a visit really reached, so that slow growth is seen in time.
"""

from __future__ import annotations

import threading

from ..core import heap, probe
from ..planner.boundary_layout import kept_bytes
from ..planner.memory import CREEP
from ..planner.schedule import Visit
from ..spec.model import ModelSpec
from ..spec.plan import Plan

_SAMPLE_SECONDS = 0.02


class MemoryWatch:
    """Samples the process's memory in a thread."""

    def __init__(self) -> None:
        probe.highest_bytes()  # discards what was before this run
        self.peak = self._since = probe.process_bytes()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def look(self) -> int:
        """Returns the bytes now and includes them in the peak."""
        with self._lock:
            now = probe.process_bytes()
            self.peak, self._since = max(self.peak, now), max(self._since, now)
        return now

    def reached(self) -> int:
        """Returns the most bytes since the last call."""
        with self._lock:
            now = probe.process_bytes()
            reached = max(now, self._since, probe.highest_bytes())
            self.peak, self._since = max(self.peak, reached), now
        return reached

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            self.look()

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class Trimming:
    """Trims one run's heap: so that large blocks are mapped on their own, where the next visit needs that."""

    def __init__(self, model: ModelSpec, plan: Plan, memory: MemoryWatch) -> None:
        self._model, self._plan, self._memory = model, plan, memory
        self._compute = sum(line.size for line in plan.memory if line.what == "compute" and line.tier == "cpu")
        # Free pages may pile up to here. A visit's memory is known to about a fifth, because of fragmentation.
        self._most = plan.predicted.cpu_peak - self._compute // 5
        self._most_alike = plan.predicted.cpu_peak - int(CREEP * self._compute)
        on_host = plan.device != "cuda"
        self._hungriest = max(stage.backward_peak for stage in model.stages) if on_host else 0
        self._next = 0  # bytes that the current visit's next micro-batch takes beyond the free pages of the one before

    def between_micro_batches(self) -> None:
        """Trims if the next micro-batch has no room. It reuses the free pages of the one before, except for blocks that are
        mapped on their own."""
        if self._memory.look() + self._next > self._most:
            heap.trim(apart=self._next > 0)

    def between_visits(self, before: Visit, after: Visit) -> None:
        """Trims if the next visit has no room. Unless it is like the one before, it may find no free block that it can use.
        (Relying on similar visits without looking at the peak got a run killed: scripts/results/TRIED.md.)"""
        reached = self._memory.reached()
        if self._shape(before) == self._shape(after):
            # A block that keeps more holds it until forward ends; one that keeps less computes it again in backward.
            room = reached + abs(self._kept(after) - self._kept(before)) <= self._most_alike
        else:
            room = self._memory.look() + self._takes(after) <= self._most
        if not room:
            heap.trim(apart=self._peaks(after)[1] > 0)
        self._next = self._takes_again(after)

    def _shape(self, visit: Visit) -> tuple[object, ...]:
        """Returns a value that is equal for visits that take the same blocks, but for outputs that are kept."""
        stage = self._model.stages[visit.stage]
        return visit.phase, stage.kind, stage.params, stage.forward_peak, stage.backward_peak

    def _kept(self, visit: Visit) -> int:
        """Returns the bytes of a micro-batch's outputs that the visit's stage keeps."""
        return kept_bytes(self._model.stages[visit.stage], self._plan.stages[visit.stage].kept)

    def _takes_again(self, visit: Visit) -> int:
        """Returns the bytes that a like micro-batch takes beyond free pages: all of them if most are mapped, as for a head's
        logits."""
        peak, mapped = self._peaks(visit)
        if not self._hungriest or not mapped:
            return 0
        return self._takes(visit) if 2 * mapped > peak else mapped

    def _takes(self, visit: Visit) -> int:
        """Returns the most bytes of host memory that a visit takes."""
        other_compute = self._compute - self._hungriest
        return other_compute + self._peaks(visit)[0] if self._hungriest else other_compute

    def _peaks(self, visit: Visit) -> tuple[int, int]:
        """Returns the bytes of one micro-batch, and how many of them are mapped on their own."""
        stage = self._model.stages[visit.stage]
        if visit.phase in ("forward", "logits"):
            return stage.forward_peak + self._kept(visit), stage.forward_mapped
        return stage.backward_peak, stage.backward_mapped
