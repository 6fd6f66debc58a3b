"""Describes what a run reports, as plain data. Other modules write it as JSON lines and render it. Also sums up intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Busy:
    """Describes one interval on a resource (compute, update, ssd read, ssd write, h2d, d2h), in seconds from the step's
    start."""

    resource: str
    label: str  # e.g. "forward block 3", "update head"
    begin: float
    end: float
    bytes: int = 0


Sent = Mapping[str, Sequence[int]]  # how many tokens each expert got, padding not counted, by mixture in running order


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Tells how evenly tokens were sent to experts. Shares are relative to an even one: 1 is even, 0 is no token."""

    entropy: float  # of the shares of a mixture: the mean over mixtures, relative to that of even shares
    least: float  # of all shares
    most: float
    unused: int  # experts without a token, of all mixtures

    @classmethod
    def of(cls, sent: Sent) -> Spread:
        """Sums up mixtures, of which there is at least one."""
        shares = [[one * len(counts) / max(1, sum(counts)) for one in counts] for counts in sent.values()]
        return cls(
            entropy=fmean(map(_evenness, shares)),
            least=min(map(min, shares)),
            most=max(map(max, shares)),
            unused=sum(share == 0 for of_one in shares for share in of_one),
        )


def _evenness(shares: Sequence[float]) -> float:
    """Returns the entropy of shares relative to an even one, as a part of the most it can be."""
    if len(shares) < 2:
        return 1.0
    return -sum(share * math.log(share / len(shares)) for share in shares if share) / len(shares) / math.log(len(shares))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """Describes one measured step."""

    step: int  # the first is 1
    total_steps: int
    loss: float
    lr: float
    grad_norm: float | None  # None if clipping is off (not computed then)
    tokens: int  # label tokens
    batch_tokens: int  # tokens computed, without padding
    seconds: float
    tflops: float  # 6 N tokens / seconds
    ram_now: int
    ram_peak: int
    read_bytes: int
    written_bytes: int
    update_cpu_seconds: float  # CPU time of the update threads
    io_cpu_seconds: float  # CPU time of the threads that move bytes
    stalls: dict[str, float]  # cause -> seconds that compute waited
    skipped: str = ""  # why the step updated nothing
    sent: Sent = field(default_factory=dict)  # empty: the model has no mixture
    router_aux_loss: float | None = None  # without its coefficient, and no part of `loss`; None: there is none
    timeline: tuple[Busy, ...] = ()
    busy: dict[str, float] = field(default_factory=dict)  # resource -> seconds in which it was busy


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalReport:
    """Describes one evaluation of one set of rows."""

    step: int  # whole steps done before it
    name: str
    loss: float  # mean over label tokens
    perplexity: float
    tokens: int  # label tokens
    rows: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleReport:
    """Describes what the model wrote after one of a recipe's fixed prompts."""

    step: int  # whole steps done before it
    number: int  # of the prompt; the first is 1
    prompt: str
    text: str
    tokens: int  # new ones, the end token included
    ended: Literal["end", "length"]
    seconds: float  # its share of the passes, which continue all prompts at once


@dataclass(frozen=True, kw_only=True, slots=True)
class BestReport:
    """Describes the copy of the weights that gave the lowest loss so far."""

    step: int  # whole steps done before it
    loss: float
    folder: str
    size: int  # bytes of its weights
    seconds: float
    problem: str = ""  # why it could not be written: the copy before is still there


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """Holds one figure of the plan and the run's."""

    what: str
    unit: Literal["bytes", "seconds"]
    predicted: float
    measured: float

    @property
    def difference(self) -> float | None:
        """Returns the difference as a share of the predicted figure, or None if nothing was predicted."""
        if self.predicted == self.measured:
            return 0.0
        return self.measured / self.predicted - 1 if self.predicted > 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """Describes a whole run. Figures per step are those of its typical steps (`reporting.Steps`)."""

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
    update_cpu: float = 0.0  # CPU seconds of the update threads per step, median
    compared: tuple[Compared, ...] = ()  # the run's figures and the plan's
    assumed: bool = False  # whether the plan's rates were assumed
    attention: str = ""  # what computed attention; empty if not known
    best: str = ""  # which weights `eval.keep_best` has kept, and where; empty without it


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
    found: list[tuple[str, float, float]] = []
    for item in sorted((item for item in timeline if item.resource == "compute"), key=lambda item: item.begin):
        name = item.label.partition(" ")[0]
        if name not in ("forward", "norm", "backward"):
            continue
        if found and found[-1][0] == name:
            found[-1] = name, found[-1][1], max(found[-1][2], item.end)
        else:
            found.append((name, item.begin, item.end))
    return found
