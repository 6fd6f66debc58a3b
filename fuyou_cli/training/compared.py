"""What a plan promised beside what a run did, resource by resource. Every surprise is a line with a name."""

from __future__ import annotations

from typing import Any

from ..planner.timeline import Timeline
from ..spec.plan import Plan
from .report import Compared, RunReport
from .run_limits import written_by_step

_LEAST_WAIT = 1e-3  # seconds per step: a shorter wait on both sides is no line
_RESOURCES = ("compute", "update", "ssd read", "ssd write", "h2d", "d2h")


def compared(report: RunReport, plan: Plan, step: Timeline, *, gpu_peak: int = 0) -> tuple[Compared, ...]:
    """Of one step (medians of the measured ones), and of the whole run's memory. `step` is the plan's, simulated. A resource's
    seconds are, of both, those in which something of it was under way, at whatever rate. `gpu_peak`: measured, of a device with
    memory of its own."""
    predicted = plan.predicted
    lines = [
        _line("peak RAM", "bytes", predicted.cpu_peak, report.ram_peak),
        *([_line("peak GPU memory", "bytes", predicted.gpu_peak, gpu_peak)] if gpu_peak else []),
        _line("step", "seconds", predicted.step_seconds if report.with_commits else plan.plain_seconds, report.step_seconds),
    ]
    promised = step.under_way
    lines += [
        _line(f"{name} under way", "seconds", promised.get(name, 0.0), report.busy[name])
        for name in _RESOURCES
        if name in report.busy
    ]
    lines += [
        _line("ssd read", "bytes", predicted.read_per_step, report.read_per_step),
        _line(
            "ssd written",
            "bytes",
            predicted.written_per_step if report.with_commits else written_by_step(plan),
            report.written_per_step,
        ),
    ]
    return (*lines, *_waits(step.stalls, report.waits))


def _line(what: str, unit: Any, predicted: float, measured: float) -> Compared:
    return Compared(what=what, unit=unit, predicted=predicted, measured=measured)


def _waits(predicted: dict[str, float], measured: dict[str, float]) -> tuple[Compared, ...]:
    """All waiting together, then by cause, the longest first."""
    causes = {cause: max(predicted.get(cause, 0.0), measured.get(cause, 0.0)) for cause in (*predicted, *measured)}
    named = sorted((cause for cause, seconds in causes.items() if seconds >= _LEAST_WAIT), key=lambda cause: -causes[cause])
    total = _line("waiting", "seconds", sum(predicted.values()), sum(measured.values()))
    lines = (_line(f"  for {cause}", "seconds", predicted.get(cause, 0.0), measured.get(cause, 0.0)) for cause in named)
    return (total, *lines)


def as_records(lines: tuple[Compared, ...]) -> list[dict[str, object]]:
    """The same for a log: difference as a share of what was predicted, null where nothing was."""
    return [
        {
            "what": line.what.strip(),
            "unit": line.unit,
            "predicted": line.predicted,
            "measured": line.measured,
            "difference": line.difference,
        }
        for line in lines
    ]
