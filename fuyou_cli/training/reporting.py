"""What a run reports: one step's timeline, and at the end the whole run beside its plan."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..spec.plan import Plan
from .report import RunReport, StepReport

LATEST = 1000  # steps whose figures are kept for medians


def settling_steps(plan: Plan, *, resumed: bool) -> int:
    """Steps at the start of a run that are not like those after them: the first warms up; moments are zero and not read in
    the first update, which follows a step later where updates are deferred; and extents are new until both were written."""
    if resumed:
        return 1
    return 3 if any(stage.deferred for stage in plan.stages) else 2


class Steps:
    """What a run's report needs of its steps, in memory that does not grow with their number."""

    def __init__(self, *, settling: int) -> None:
        self.count = 0
        self.last: StepReport | None = None  # the only one with its timeline
        self.stalls: dict[str, float] = {}  # of all steps
        self.settled = 0  # steps after the first `settling`
        self._settling = settling
        self._early: list[StepReport] = []
        self._later: deque[StepReport] = deque(maxlen=LATEST)
        self._tokens, self._seconds = 0, 0.0  # of the settled ones

    def add(self, report: StepReport) -> None:
        self.count, self.last = self.count + 1, report
        for cause, waited in report.stalls.items():
            self.stalls[cause] = self.stalls.get(cause, 0.0) + waited
        kept = replace(report, timeline=())
        if self.count <= self._settling:
            self._early.append(kept)
            return
        self.settled += 1
        self._later.append(kept)
        self._tokens += report.batch_tokens
        self._seconds += report.seconds

    @property
    def typical(self) -> Sequence[StepReport]:
        """The latest of the settled ones; of a shorter run all but the first, which warms up, where there are others."""
        return list(self._later) or self._early[1:] or self._early

    @property
    def tokens_per_second(self) -> float:
        """Of the same, without end."""
        if self.settled:
            return self._tokens / (self._seconds or 1e-9)
        return sum(step.batch_tokens for step in self.typical) / (sum(step.seconds for step in self.typical) or 1e-9)


def run_report(
    steps: Steps,
    *,
    losses: Sequence[float],
    plan: Plan,
    parameters: int,
    seconds: float,
    ram_peak: int,
    written_total: int,
    output_dir: str,
) -> RunReport:
    """The run beside its plan; figures per step are medians of typical ones."""
    typical, rate = steps.typical, steps.tokens_per_second
    averaged = _whole_intervals(typical, plan)
    plain = [step for step in typical if not _commits(step, plan)] or typical
    middle = _mean if averaged else _median
    steps_seen = averaged or plain
    return RunReport(
        steps=steps.count,
        settled=steps.settled,
        seconds=seconds,
        first_loss=losses[0] if losses else float("nan"),
        last_loss=losses[-1] if losses else float("nan"),
        losses=tuple(losses),
        tokens_per_second=rate,
        tflops=6.0 * parameters * rate / 1e12,
        ram_budget=plan.cpu_budget,
        ram_peak=ram_peak,
        step_seconds=middle([step.seconds for step in steps_seen]),
        read_per_step=round(middle([step.read_bytes for step in steps_seen])),
        written_per_step=round(middle([step.written_bytes for step in steps_seen])),
        written_total=written_total,
        stalls=steps.stalls,
        timeline=steps.last.timeline if steps.last else (),
        timeline_stalls=steps.last.stalls if steps.last else {},
        output_dir=str(Path(output_dir).expanduser()),
        busy=_medians([step.busy for step in plain]),
        waits=_medians([step.stalls for step in plain]),
        with_commits=bool(averaged) or not plan.has_apart_commits,
        update_cpu=_median([step.update_cpu_seconds for step in typical]),
    )


def _whole_intervals(steps: Sequence[StepReport], plan: Plan) -> Sequence[StepReport]:
    """The latest, as many as make whole intervals between commits; none where every step is alike, or there are too few."""
    if plan.commit_every is None or not plan.has_apart_commits:
        return ()
    return steps[len(steps) % plan.commit_every :] if len(steps) >= plan.commit_every else ()


def _commits(step: StepReport, plan: Plan) -> bool:
    """Whether some update in it writes for a commit what others do not."""
    late = any(stage.deferred for stage in plan.stages) and step.step > 1
    every = plan.commit_every or 1
    return plan.has_apart_commits and (step.step % every == 0 or (late and (step.step - 1) % every == 0))


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each name over all steps; a step without it has none of it."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}
