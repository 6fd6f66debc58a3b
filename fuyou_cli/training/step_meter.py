"""Measures a run's steps: seconds, bytes and waits of each, when each resource was busy, and the process's memory.

`Trimming` gives the heap's free pages back to the system when the plan's peak needs it, not earlier. Every page given back must
be faulted in again, which can cost a small model a tenth of its time. A visit like the one before it (the next block of the
same pass) finds the free pages that the other left, so it reaches the same peak and a little more. The kernel tells what a
visit really reached, so that slow growth is seen in time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..core import probe, process
from ..engine.crossings import ComputedMicroBatch, Computing
from ..engine.devices.base import Copy, Device
from ..engine.executor import StepOutcome
from ..engine.moves import ComputeWait
from ..engine.visits import VisitInterval, Visits
from ..planner.boundary_layout import kept_bytes
from ..planner.memory import CREEP
from ..planner.schedule import Visit
from ..spec.model import ModelSpec
from ..spec.plan import Plan
from ..swap.daemon import RequestEvent, SwapDaemon
from .loggers import Trace
from .report import Busy, Spread, StepReport, busy_seconds

_SAMPLE_SECONDS = 0.02  # between looks at the process's memory
_OF_STORE = {"read": "ssd read", "write": "ssd write", "update": "update", "chunk": "update chunk"}


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
            process.trim(apart=self._next > 0)

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
            process.trim(apart=self._peaks(after)[1] > 0)
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


class StepMeter:
    """Measures the steps of one run, each from `begin` to `end`. `stalls`: seconds waited so far, by cause. `flops_per_token`:
    of all that is trained, on whatever rank."""

    def __init__(
        self, *, model: ModelSpec, daemon: SwapDaemon, device: Device, stalls: Mapping[str, float], memory: MemoryWatch,
        flops_per_token: float,
    ) -> None:  # fmt: skip
        self._model, self._daemon, self._device, self._stalls, self._memory = model, daemon, device, stalls, memory
        self._flops_per_token = flops_per_token
        self._begin = self._end = 0.0
        self._counters, self._waited = daemon.counters(), dict(stalls)
        self._before: tuple[list[RequestEvent], list[Copy]] = ([], [])  # what ended between two steps, for a trace
        self._traced: tuple[Trace, Visits, Computing] | None = None

    def trace(self, trace: Trace, visits: Visits) -> None:
        """Passes every later step to `trace`, micro-batch by micro-batch and chunk by chunk of the updates."""
        self._daemon.log_chunks()
        visits.crossings.computing = computing = Computing(self._device)
        self._traced = trace, visits, computing

    def begin(self) -> None:
        self._counters, self._waited = self._daemon.counters(), dict(self._stalls)
        self._before = self._daemon.events(), self._device.copies()
        self._begin = time.monotonic()

    def end(self) -> None:
        self._end = time.monotonic()

    def report(self, outcome: StepOutcome, *, step: int, total_steps: int, lr: float, tokens: int) -> StepReport:
        """Reports the step that has just ended. `tokens`: the tokens computed."""
        before, after, seconds = self._counters, self._daemon.counters(), self._end - self._begin
        events, copies = self._daemon.events(), self._device.copies()
        items = intervals(outcome.intervals, events, copies, begin=self._begin, model=self._model)
        if self._traced is not None:
            trace, visits, computing = self._traced
            before_step = intervals((), *self._before, begin=self._begin, model=self._model)
            as_visits = (replace(item, resource="visit") if item.resource == "compute" else item for item in items)
            computed = of_micro_batches(computing.take(), visits.moves.waits(), begin=self._begin, model=self._model)
            trace.step(step, seconds, self._begin, [*before_step, *as_visits, *computed])
        shown = (item for item in items if item.end > 0 and item.resource != "update chunk")
        moved = tuple(replace(item, begin=max(0.0, item.begin)) for item in shown)
        waited = {cause: total - self._waited.get(cause, 0.0) for cause, total in self._stalls.items()}
        return StepReport(
            step=step,
            total_steps=total_steps,
            loss=outcome.loss,
            lr=lr,
            grad_norm=outcome.grad_norm,
            skipped=outcome.skipped,
            sent=outcome.sent or {},
            experts=Spread.of(outcome.sent) if outcome.sent else None,
            router_aux_loss=outcome.aux_loss,
            tokens=outcome.label_tokens,
            batch_tokens=tokens,
            seconds=seconds,
            tflops=self._flops_per_token * tokens / seconds / 1e12,
            ram_now=self._memory.look(),
            ram_peak=self._memory.peak,
            read_bytes=after.read_bytes - before.read_bytes,
            written_bytes=after.written_bytes - before.written_bytes,
            update_cpu_seconds=(after.update_cpu_ns - before.update_cpu_ns) / 1e9,
            io_cpu_seconds=(after.ring_cpu_ns - before.ring_cpu_ns) / 1e9,
            stalls={cause: seconds for cause, seconds in waited.items() if seconds > 0},
            timeline=moved,
            busy=busy_seconds(moved),
        )


def intervals(
    visits: Iterable[VisitInterval], events: Iterable[RequestEvent], copies: Iterable[Copy], *, begin: float, model: ModelSpec
) -> list[Busy]:
    """Returns when each resource was busy in a step that began at `begin` (monotonic seconds), including what began or ended
    before it, at negative seconds."""
    names = [stage.name for stage in model.stages]

    def busy(resource: str, label: str, since: float, until: float, size: int = 0) -> Busy:
        return Busy(resource=resource, label=label, begin=since - begin, end=until - begin, bytes=size)

    items = [busy("compute", f"{_direction(item.phase, model)} {names[item.stage]}", item.begin, item.end) for item in visits]
    for event in events:
        what = f"{event.operation} {names[event.label]}"
        items.append(busy(_OF_STORE[event.operation], what, event.begin_ns / 1e9, event.end_ns / 1e9, event.bytes))
    for copy in copies:
        resource, to = ("h2d", "device") if copy.up else ("d2h", "host")
        items.append(busy(resource, f"copy to the {to}", copy.begin, copy.end, copy.bytes))
    return items


def of_micro_batches(
    computed: Iterable[ComputedMicroBatch], waits: Iterable[ComputeWait], *, begin: float, model: ModelSpec
) -> list[Busy]:
    """Returns what only a trace shows: the compute of each micro-batch, and each wait."""
    items = [Busy(resource="wait", label=wait.cause, begin=wait.begin - begin, end=wait.end - begin) for wait in waits]
    for item in computed:
        label = f"{item.phase} {model.stages[item.stage].name}, micro-batch {item.number + 1}"
        items.append(Busy(resource="compute", label=label, begin=item.begin - begin, end=item.end - begin))
    return items


def _direction(phase: str, model: ModelSpec) -> str:
    """Returns the direction that a visit counts as. A whole head, which does both at once, counts as forward."""
    if phase == "head":
        return "backward" if model.head_is_cut else "forward"
    return "forward" if phase == "logits" else phase
