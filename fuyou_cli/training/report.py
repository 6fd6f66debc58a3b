"""What a run reports: one record per step, one for the whole run. Plain data, written as JSON lines and rendered elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Busy:
    """One interval on one resource (compute, update, ssd read, ssd write, h2d, d2h), seconds from the step's start."""

    resource: str
    label: str  # e.g. "forward block 3", "update head"
    begin: float
    end: float
    bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    step: int  # 1 for the first
    total_steps: int
    loss: float
    lr: float
    grad_norm: float | None  # None when clipping is off (never computed then)
    tokens: int  # label tokens
    batch_tokens: int  # tokens computed on, padding excluded
    seconds: float
    tflops: float  # 6 N tokens / seconds
    ram_now: int
    ram_peak: int
    read_bytes: int
    written_bytes: int
    update_cpu_seconds: float  # CPU time of the update threads
    io_cpu_seconds: float  # CPU time of the threads that move bytes
    stalls: dict[str, float]  # cause -> seconds compute waited
    skipped: str = ""  # why the step updated nothing
    timeline: tuple[Busy, ...] = ()
    busy: dict[str, float] = field(default_factory=dict)  # resource -> seconds in which something of it was under way


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One figure of the plan beside the run's."""

    what: str
    unit: Literal["bytes", "seconds"]
    predicted: float
    measured: float

    @property
    def difference(self) -> float | None:
        """Of the measured one, as a share of the predicted; None where nothing was predicted."""
        if self.predicted == self.measured:
            return 0.0
        return self.measured / self.predicted - 1 if self.predicted > 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    steps: int
    settled: int  # of these, after the first ones that are not like the rest
    seconds: float
    first_loss: float
    last_loss: float
    losses: tuple[float, ...]
    tokens_per_second: float
    tflops: float
    ram_budget: int
    ram_peak: int
    step_seconds: float  # median, as the bytes of one; the mean of whole intervals where only some steps are committed
    read_per_step: int
    written_per_step: int
    written_total: int
    stalls: dict[str, float]  # of all steps
    timeline: tuple[Busy, ...]  # of the last step, which waited:
    timeline_stalls: dict[str, float]
    output_dir: str
    busy: dict[str, float] = field(default_factory=dict)  # resource -> seconds per step, median
    waits: dict[str, float] = field(default_factory=dict)  # cause -> seconds per step, median
    update_cpu: float = 0.0  # CPU seconds of the update threads per step, median
    compared: tuple[Compared, ...] = ()  # with the plan, line by line
    assumed: bool = False  # the plan's rates were
    with_commits: bool = True  # the step's seconds and bytes have their share of commits; False: of steps without one
