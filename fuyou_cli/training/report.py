"""What a run reports, as plain data: of each step, each evaluation and the whole run. Also sums up a run and compares it with
its plan.

There is one record of each. The run makes it; the log, the loggers and the screens take it; and reading a log gives it back. So
fields have the bounds that `core/json_files` checks: somebody else may have written the log. JSON has no NaN: a figure that is
not finite is null there, and NaN again when it is read.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, WrapValidator

from ..planner.costs import Costs
from ..planner.simulate import Timeline
from ..spec.plan import Plan

LATEST = 1000  # steps of a run whose figures are kept
_LEAST_WAIT = 1e-3  # seconds per step; a wait that is shorter in plan and run gets no line
_RESOURCES = ("compute", "update", "ssd read", "ssd write", "h2d", "d2h")

Number = Annotated[float, Field(le=1e30)]
Signed = Annotated[float, Field(ge=-1e30, le=1e30)]
Seconds = Annotated[float, Field(le=1e10)]
MaybeNaN = Annotated[Number, WrapValidator(lambda value, check: math.nan if value is None else check(value))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Busy:
    """One interval on a resource (compute, update, ssd read, ssd write, h2d, d2h), in seconds from the step's start."""

    resource: str
    label: str  # e.g. "forward block 3", "update head"
    begin: Signed
    end: Signed
    bytes: int = 0


TokensSent = dict[str, tuple[int, ...]]  # how many tokens each expert got, padding not counted, by mixture in running order


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How evenly tokens were sent to experts. Shares are relative to an even one: 1 is even, 0 is no token."""

    entropy: Annotated[float, Field(ge=-1, le=2)]  # of a mixture's shares, relative to even ones: the mean over mixtures
    least: Annotated[float, Field(le=1e9)]  # of all shares
    most: Annotated[float, Field(le=1e9)]
    unused: int  # experts without a token, of all mixtures

    @classmethod
    def of(cls, sent: TokensSent) -> Spread:
        """Sums up mixtures, of which there is at least one."""
        shares = [[count * len(counts) / max(1, sum(counts)) for count in counts] for counts in sent.values()]
        return cls(
            entropy=statistics.fmean(map(_evenness, shares)),
            least=min(map(min, shares)),
            most=max(map(max, shares)),
            unused=sum(share == 0 for of_mixture in shares for share in of_mixture),
        )


def _evenness(shares: Sequence[float]) -> float:
    """Returns the entropy of shares relative to an even one, as a part of the most it can be."""
    if len(shares) < 2:
        return 1.0
    return -sum(share * math.log(share / len(shares)) for share in shares if share) / len(shares) / math.log(len(shares))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One measured step. Fields with a default may be missing in a log."""

    step: Annotated[int, Field(ge=1)]
    total_steps: int = 0
    loss: MaybeNaN
    lr: Number
    grad_norm: Number | None  # None if clipping is off (not computed then), or not finite
    tokens: int = 0  # label tokens
    batch_tokens: int  # tokens computed, without padding
    seconds: Seconds
    tflops: MaybeNaN = math.nan  # 6 N tokens / seconds
    ram_now: int = 0
    ram_peak: int  # so far
    read_bytes: int
    written_bytes: int
    update_cpu_seconds: Seconds = 0.0  # CPU time of the update threads
    io_cpu_seconds: Seconds = 0.0  # CPU time of the threads that move bytes
    stalls: dict[str, Seconds]  # cause -> seconds that compute waited
    skipped: str = ""  # why the step updated nothing
    router_aux_loss: Number | None = None  # without its coefficient, and no part of `loss`; None: there is none
    busy: dict[str, Seconds] = field(default_factory=dict)  # resource -> seconds in which it was busy
    experts: Spread | None = None  # None: the model has no mixture
    sent: TokensSent = field(default_factory=dict)  # the log has that of the last step only, and so for `timeline`
    timeline: tuple[Busy, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalReport:
    """One evaluation of one set of rows."""

    step: int  # whole steps done before it
    name: str
    loss: MaybeNaN  # mean over label tokens
    perplexity: MaybeNaN
    tokens: int  # label tokens
    rows: int
    seconds: Seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleReport:
    """What the model wrote after one of a recipe's fixed prompts."""

    step: int  # whole steps done before it
    number: Annotated[int, Field(ge=1)]  # of the prompt
    prompt: str
    text: str
    tokens: int  # new ones, the end token included
    ended: Literal["end", "length"]
    seconds: Seconds  # its share of the passes, which continue all prompts at once


@dataclass(frozen=True, kw_only=True, slots=True)
class BestReport:
    """The copy of the weights that gave the lowest loss so far."""

    step: int  # whole steps done before it
    loss: Number
    folder: str
    size: int = 0  # bytes of its weights
    seconds: Seconds = 0.0
    problem: str = ""  # why it could not be written: the copy before is still there


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One figure of the plan and the run's."""

    what: str
    unit: Literal["bytes", "seconds"]
    predicted: Number
    measured: Number

    @property
    def difference(self) -> float | None:
        """Returns the difference as a share of the predicted figure, or None if nothing was predicted."""
        if self.predicted == self.measured:
            return 0.0
        return self.measured / self.predicted - 1 if self.predicted > 0 else None

    def as_data(self) -> dict[str, object]:
        """Returns the line for a log, with the difference (null if nothing was predicted)."""
        return {**asdict(self), "what": self.what.strip(), "difference": self.difference}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFigures:
    """What one of several ranks did in a run."""

    host: str
    read_per_step: int
    written_per_step: int
    written_total: int
    ram_peak: int
    waits: dict[str, Seconds]  # cause -> seconds per step, median
    ram_planned: int = 0  # 0: not logged


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """A whole run. Figures per step are those of its typical steps (`Steps`)."""

    steps: int
    settled: int  # steps after the first ones, which differ from the rest
    seconds: float
    losses: tuple[float, ...]
    tokens_per_second: float
    tflops: float
    ram_budget: int
    ram_peak: int
    step_seconds: float  # median, as are the bytes; if only some steps are committed, the mean of whole commit intervals
    read_per_step: int
    written_per_step: int
    written_total: int
    stalls: dict[str, float]  # of all steps
    timeline: tuple[Busy, ...]  # of the last step
    timeline_stalls: dict[str, float]
    output_dir: str
    busy: dict[str, float] = field(default_factory=dict)  # resource -> seconds per step, median
    waits: dict[str, float] = field(default_factory=dict)  # cause -> seconds per step, median
    compared: tuple[Compared, ...] = ()  # the run's figures and the plan's
    assumed: bool = False  # whether the plan's rates were assumed
    attention: str = ""  # what computed attention; empty if not known
    best: str = ""  # which weights `eval.keep_best` has kept, and where; empty without it
    ranks: tuple[RankFigures, ...] = ()  # of several, whose first one's figures the others are

    @property
    def written_by_all(self) -> int:
        """Returns the bytes that all ranks have written to their stores."""
        return sum(rank.written_total for rank in self.ranks) or self.written_total

    def of_rank(self, host: str, ram_planned: int) -> RankFigures:
        """Returns the figures of the rank whose report this is."""
        return RankFigures(
            host=host, read_per_step=self.read_per_step, written_per_step=self.written_per_step,
            written_total=self.written_total, ram_peak=self.ram_peak, waits=self.waits, ram_planned=ram_planned,
        )  # fmt: skip


# ---- one step's intervals ----------------------------------------------------------------------------------------------


def merged(intervals: Sequence[Busy]) -> list[tuple[float, float]]:
    """Returns the union of the intervals, in order. Requests in flight at the same time count once."""
    spans: list[tuple[float, float]] = []
    for begin, end in sorted((item.begin, item.end) for item in intervals if item.end > item.begin):
        if spans and begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((begin, end))
    return spans


def busy_seconds(timeline: Sequence[Busy]) -> dict[str, float]:
    """Returns the seconds that each resource was busy, in order of first appearance."""
    by_resource: dict[str, list[Busy]] = {}
    for item in timeline:
        by_resource.setdefault(item.resource, []).append(item)
    return {name: sum(end - begin for begin, end in merged(items)) for name, items in by_resource.items()}


def phases(timeline: Sequence[Busy]) -> list[tuple[str, float, float]]:
    """Returns (name, begin, end) of each forward and backward, of every sweep, from the labels of the compute intervals. A
    backward that only measures is named "norm"."""
    passes: list[tuple[str, float, float]] = []
    for item in sorted((item for item in timeline if item.resource == "compute"), key=lambda item: item.begin):
        name = item.label.partition(" ")[0]
        if name not in ("forward", "norm", "backward"):
            continue
        if passes and passes[-1][0] == name:
            passes[-1] = name, passes[-1][1], max(passes[-1][2], item.end)
        else:
            passes.append((name, item.begin, item.end))
    return passes


# ---- the whole run ----------------------------------------------------------------------------------------------------


def settling_steps(plan: Plan, *, resumed: bool) -> int:
    """Returns how many first steps differ from the rest: they warm up, have no moments to read, or write to new extents."""
    if resumed:
        return 1
    return 3 if any(stage.deferred for stage in plan.stages) else 2


class Steps:
    """The figures of steps that a run's report needs, of the latest `most` steps, so that memory does not grow with their
    number."""

    def __init__(self, *, settling: int, most: int | None = LATEST) -> None:
        self.count = 0
        self.last: StepReport | None = None  # only this one keeps its timeline
        self.stalls: dict[str, float] = {}  # of all steps
        self._settling = settling
        self._latest: deque[StepReport] = deque(maxlen=most)

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
    flops_per_token: float,
    seconds: float,
    ram_budget: int,
    ram_peak: int,
    written_total: int,
    output_dir: str,
    commit_interval: int | None = None,
    attention: str = "",
    best: str = "",
) -> RunReport:
    """Sums up a run. `commit_interval`: only every so many steps write for a commit, so bytes and seconds are means over whole
    intervals."""
    typical = steps.typical
    whole_intervals = typical[len(typical) % commit_interval :] if commit_interval else ()
    middle, averaged = (statistics.fmean, whole_intervals) if whole_intervals else (_median, typical)
    rate = sum(step.batch_tokens for step in typical) / (sum(step.seconds for step in typical) or 1e-9)
    return RunReport(
        steps=steps.count,
        settled=steps.settled,
        seconds=seconds,
        losses=tuple(losses),
        tokens_per_second=rate,
        tflops=flops_per_token * rate / 1e12,
        ram_budget=ram_budget,
        ram_peak=ram_peak,
        step_seconds=middle([step.seconds for step in averaged]),
        read_per_step=round(middle([step.read_bytes for step in averaged])),
        written_per_step=round(middle([step.written_bytes for step in averaged])),
        written_total=written_total,
        stalls=steps.stalls,
        timeline=steps.last.timeline if steps.last else (),
        timeline_stalls=steps.last.stalls if steps.last else {},
        output_dir=str(Path(output_dir).expanduser()),
        busy=medians([step.busy for step in typical]),
        waits=medians([step.stalls for step in typical]),
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


_Line = tuple[str, Literal["bytes", "seconds"], float, float]


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
