"""What a run reports: one step's timeline, and at the end the whole run beside its plan."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..engine.executor import StepOutcome
from ..spec.model import ModelSpec
from ..spec.plan import Plan
from ..swap.daemon import Event
from .report import Busy, RunReport, StepReport


def timeline(outcome: StepOutcome, events: Iterable[Event], *, begin: float, model: ModelSpec) -> tuple[Busy, ...]:
    """When which resource was busy in a step that began at `begin` (monotonic seconds)."""
    names = [stage.name for stage in model.stages]
    busy = [
        Busy(
            resource="compute",
            label=f"{_direction(item.phase, model)} {names[item.stage]}",
            begin=item.begin - begin,
            end=item.end - begin,
        )
        for item in outcome.intervals
    ]
    resources = {"read": "ssd read", "write": "ssd write", "update": "update"}
    busy += [
        Busy(
            resource=resources[event.operation],
            label=f"{event.operation} {names[event.label]}",
            begin=max(0.0, event.begin_ns / 1e9 - begin),
            end=event.end_ns / 1e9 - begin,
            bytes=event.bytes,
        )
        for event in events
        if event.end_ns / 1e9 > begin
    ]
    return tuple(busy)


def _direction(phase: str, model: ModelSpec) -> str:
    """Where a visit counts: a whole head, which is both at once, with forward."""
    if phase == "head":
        return "backward" if model.head_is_cut else "forward"
    return "forward" if phase == "logits" else phase


def run_report(
    steps: Sequence[StepReport],
    *,
    losses: Sequence[float],
    plan: Plan,
    parameters: int,
    seconds: float,
    ram_peak: int,
    written_total: int,
    output_dir: str,
) -> RunReport:
    """The run beside its plan. Medians leave out the first step, which also warms up."""
    later = steps[1:] or steps
    tokens = sum(step.batch_tokens for step in later)
    computing = sum(step.seconds for step in later) or 1e-9
    stalls: dict[str, float] = {}
    for step in steps:
        for cause, waited in step.stalls.items():
            stalls[cause] = stalls.get(cause, 0.0) + waited
    return RunReport(
        steps=len(steps),
        seconds=seconds,
        first_loss=losses[0] if losses else float("nan"),
        last_loss=losses[-1] if losses else float("nan"),
        losses=tuple(losses),
        tokens_per_second=tokens / computing,
        tflops=6.0 * parameters * tokens / computing / 1e12,
        ram_budget=plan.cpu_budget,
        ram_peak=ram_peak,
        step_seconds=statistics.median(step.seconds for step in later) if later else 0.0,
        read_per_step=round(statistics.median(step.read_bytes for step in later)) if later else 0,
        written_per_step=round(statistics.median(step.written_bytes for step in later)) if later else 0,
        written_total=written_total,
        stalls=stalls,
        timeline=steps[-1].timeline if steps else (),
        timeline_stalls=steps[-1].stalls if steps else {},
        output_dir=str(Path(output_dir).expanduser()),
        busy=_medians([step.busy for step in later]),
        waits=_medians([step.stalls for step in later]),
        update_cpu=statistics.median(step.update_cpu_seconds for step in later) if later else 0.0,
    )


def _medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each name over all steps; a step without it has none of it."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}
