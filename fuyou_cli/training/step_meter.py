"""Measures a run's steps: seconds, bytes and waits of each, and when each resource was busy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..engine.crossings import ComputedMicroBatch, Computing
from ..engine.devices.base import Copy, Device
from ..engine.executor import StepOutcome
from ..engine.moves import Wait
from ..engine.visits import Visits
from ..spec.model import ModelSpec
from ..swap.daemon import Event, SwapDaemon
from .memory_watch import MemoryWatch
from .report import Busy, Spread, StepReport, busy_seconds
from .trace import Trace

_OF_STORE = {"read": "ssd read", "write": "ssd write", "update": "update", "chunk": "update chunk"}


class StepMeter:
    """Measures the steps of one run, each from `begin` to `end`. `stalls`: seconds waited so far, by cause."""

    def __init__(
        self, *, model: ModelSpec, daemon: SwapDaemon, device: Device, stalls: Mapping[str, float], memory: MemoryWatch
    ) -> None:
        self._model, self._daemon, self._device, self._stalls, self._memory = model, daemon, device, stalls, memory
        self._begin = self._end = 0.0
        self._counters, self._waited = daemon.counters(), dict(stalls)
        self._before: tuple[list[Event], list[Copy]] = ([], [])  # what ended between two steps, for a trace
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
        moved = timeline(outcome, events, copies, begin=self._begin, model=self._model)
        if self._traced is not None:
            self._add_to_trace(step, seconds, outcome, [*self._before[0], *events], [*self._before[1], *copies])
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
            tflops=self._model.flops_per_token * tokens / seconds / 1e12,
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

    def _add_to_trace(self, step: int, seconds: float, outcome: StepOutcome, events: list[Event], copies: list[Copy]) -> None:
        assert self._traced is not None
        trace, visits, computing = self._traced
        moved = intervals(outcome, events, copies, begin=self._begin, model=self._model)
        computed = of_micro_batches(computing.take(), visits.moves.waits(), begin=self._begin, model=self._model)
        as_visits = (replace(item, resource="visit") if item.resource == "compute" else item for item in moved)
        trace.step(step, seconds, self._begin, [*as_visits, *computed])


def timeline(
    outcome: StepOutcome, events: Iterable[Event], copies: Iterable[Copy], *, begin: float, model: ModelSpec
) -> tuple[Busy, ...]:
    """Returns when each resource was busy in a step that began at `begin` (monotonic seconds), without chunks of updates."""
    updates = (event for event in events if event.operation != "chunk")
    items = intervals(outcome, updates, copies, begin=begin, model=model)
    return tuple(replace(item, begin=0.0) if item.begin < 0 else item for item in items if item.end > 0)


def intervals(
    outcome: StepOutcome, events: Iterable[Event], copies: Iterable[Copy], *, begin: float, model: ModelSpec
) -> list[Busy]:
    """Returns the same intervals, including what began or ended before the step, at negative seconds."""
    names = [stage.name for stage in model.stages]

    def busy(resource: str, label: str, since: float, until: float, size: int = 0) -> Busy:
        return Busy(resource=resource, label=label, begin=since - begin, end=until - begin, bytes=size)

    items = [
        busy("compute", f"{_direction(item.phase, model)} {names[item.stage]}", item.begin, item.end)
        for item in outcome.intervals
    ]
    for event in events:
        what = f"{event.operation} {names[event.label]}"
        items.append(busy(_OF_STORE[event.operation], what, event.begin_ns / 1e9, event.end_ns / 1e9, event.bytes))
    for copy in copies:
        resource, to = ("h2d", "device") if copy.up else ("d2h", "host")
        items.append(busy(resource, f"copy to the {to}", copy.begin, copy.end, copy.bytes))
    return items


def of_micro_batches(
    computed: Iterable[ComputedMicroBatch], waits: Iterable[Wait], *, begin: float, model: ModelSpec
) -> list[Busy]:
    """Returns what only a trace shows: the compute of each micro-batch, and each wait."""
    items = [
        Busy(
            resource="compute",
            label=f"{item.phase} {model.stages[item.stage].name}, micro-batch {item.number + 1}",
            begin=item.begin - begin,
            end=item.end - begin,
        )
        for item in computed
    ]
    items += [Busy(resource="wait", label=wait.cause, begin=wait.begin - begin, end=wait.end - begin) for wait in waits]
    return items


def _direction(phase: str, model: ModelSpec) -> str:
    """Returns the direction that a visit counts as. A whole head, which does both at once, counts as forward."""
    if phase == "head":
        return "backward" if model.head_is_cut else "forward"
    return "forward" if phase == "logits" else phase
