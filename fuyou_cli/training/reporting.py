"""Compares a run with its plan, resource by resource, so that every difference shows in a named line."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from ..planner.costs import Costs
from ..planner.timeline import Timeline
from ..spec.plan import Plan
from .report import Compared, RunReport, StepReport

LATEST = 1000  # number of steps whose figures are kept
_LEAST_WAIT = 1e-3  # seconds per step; a wait that is shorter in plan and run gets no line
_Line = tuple[str, Literal["bytes", "seconds"], float, float]
_RESOURCES = ("compute", "update", "ssd read", "ssd write", "h2d", "d2h")


def settling_steps(plan: Plan, *, resumed: bool) -> int:
    """Returns how many first steps differ from the rest: they warm up, have no moments to read, or write to new extents."""
    if resumed:
        return 1
    return 3 if any(stage.deferred for stage in plan.stages) else 2


class Steps:
    """Keeps the figures of steps that a run's report needs, in memory that does not grow with their number."""

    def __init__(self, *, settling: int) -> None:
        self.count = 0
        self.last: StepReport | None = None  # only this one keeps its timeline
        self.stalls: dict[str, float] = {}  # of all steps
        self._settling = settling
        self._latest: deque[StepReport] = deque(maxlen=LATEST)

    def add(self, report: StepReport) -> None:
        self.count, self.last = self.count + 1, report
        for cause, waited in report.stalls.items():
            self.stalls[cause] = self.stalls.get(cause, 0.0) + waited
        self._latest.append(replace(report, timeline=(), sent={}))

    @property
    def settled(self) -> int:
        """Returns the number of steps after the first `settling`."""
        return max(0, self.count - self._settling)

    @property
    def typical(self) -> Sequence[StepReport]:
        """Returns the latest settled steps. In a shorter run, returns all but the first, if there are others."""
        latest = list(self._latest)
        return latest[-self.settled :] if self.settled else latest[1:] or latest


def run_report(
    steps: Steps,
    *,
    losses: Sequence[float],
    plan: Plan,
    flops_per_token: float,
    seconds: float,
    ram_peak: int,
    written_total: int,
    output_dir: str,
    attention: str = "",
    best: str = "",
) -> RunReport:
    """Sums up a run. If only some steps write for a commit, bytes and seconds are means over whole commit intervals."""
    typical = steps.typical
    every = plan.commit_every if plan.has_apart_commits else None
    averaged = typical[len(typical) % every :] if every and len(typical) >= every else ()
    middle, seen = (statistics.fmean, averaged) if averaged else (_median, typical)
    rate = sum(step.batch_tokens for step in typical) / (sum(step.seconds for step in typical) or 1e-9)
    return RunReport(
        steps=steps.count,
        settled=steps.settled,
        seconds=seconds,
        losses=tuple(losses),
        tokens_per_second=rate,
        tflops=flops_per_token * rate / 1e12,
        ram_budget=plan.cpu_budget,
        ram_peak=ram_peak,
        step_seconds=middle([step.seconds for step in seen]),
        read_per_step=round(middle([step.read_bytes for step in seen])),
        written_per_step=round(middle([step.written_bytes for step in seen])),
        written_total=written_total,
        stalls=steps.stalls,
        timeline=steps.last.timeline if steps.last else (),
        timeline_stalls=steps.last.stalls if steps.last else {},
        output_dir=str(Path(output_dir).expanduser()),
        busy=medians([step.busy for step in typical]),
        waits=medians([step.stalls for step in typical]),
        update_cpu=_median([step.update_cpu_seconds for step in typical]),
        attention=attention,
        best=best,
    )


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the median of each name over all steps. A step without a name counts as 0."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}


def through_memory(report: RunReport, costs: Costs, plan: Plan) -> float:
    """Returns the bytes that a step moved through the host's memory, 0 if its bandwidth is not known. Those of copies are the
    last step's; AdamW's follow from the parameters that it updates."""
    copied = sum(item.bytes for item in report.timeline if item.resource in ("h2d", "d2h"))
    adamw = sum(map(costs.update_seconds, plan.stages)) * costs.update_bytes_rate
    moved = report.read_per_step + report.written_per_step + copied + adamw
    return moved if costs.hardware.dram else 0.0


def compared(
    report: RunReport, plan: Plan, step: Timeline, *, gpu_peak: int = 0, memory: tuple[float, float] = (0.0, 0.0)
) -> tuple[Compared, ...]:
    """Pairs the run's step figures and memory (bytes) with the plan's. `step`: the simulated step. `gpu_peak`: the measured
    peak, 0 for a device without its own memory. `memory`: the bytes per second that the host's memory gives, and the step's
    `through_memory`."""
    predicted, promised, waits = plan.predicted, step.under_way, report.waits
    longest = {cause: max(step.stalls.get(cause, 0.0), waits.get(cause, 0.0)) for cause in (*step.stalls, *waits)}
    causes = sorted((cause for cause in longest if longest[cause] >= _LEAST_WAIT), key=lambda cause: -longest[cause])
    bandwidth, moved = memory
    through: list[_Line] = [("through the host's memory", "bytes", step.in_use.get("dram", 0.0) * bandwidth, moved)]
    on_device: list[_Line] = [("peak GPU memory", "bytes", predicted.gpu_peak, gpu_peak)] if gpu_peak else []
    lines: list[_Line] = [
        ("peak RAM", "bytes", predicted.cpu_peak, report.ram_peak),
        *on_device,
        ("step", "seconds", predicted.step_seconds, report.step_seconds),
        *(
            (f"{name} under way", "seconds", promised.get(name, 0.0), report.busy[name])
            for name in _RESOURCES
            if name in report.busy
        ),
        *(through if moved else ()),
        ("ssd read", "bytes", predicted.read_per_step, report.read_per_step),
        ("ssd written", "bytes", predicted.written_per_step, report.written_per_step),
        ("waiting", "seconds", sum(step.stalls.values()), sum(waits.values())),
        *((f"  for {cause}", "seconds", step.stalls.get(cause, 0.0), waits.get(cause, 0.0)) for cause in causes),
    ]
    return tuple(Compared(what=what, unit=unit, predicted=plan, measured=run) for what, unit, plan, run in lines)


def as_records(lines: tuple[Compared, ...]) -> list[dict[str, object]]:
    """Returns the lines for a log, with the difference as a share of the predicted figure (null if nothing was predicted)."""
    return [{**asdict(line), "what": line.what.strip(), "difference": line.difference} for line in lines]
