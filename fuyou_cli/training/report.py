"""What a run reports: one record per step, one for the whole run. Plain data, written as JSON lines and rendered elsewhere."""

from __future__ import annotations

from dataclasses import dataclass


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
    timeline: tuple[Busy, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    steps: int
    seconds: float
    first_loss: float
    last_loss: float
    losses: tuple[float, ...]
    tokens_per_second: float
    tflops: float
    ram_budget: int
    ram_peak: int
    ram_predicted: int
    step_seconds: float  # median
    step_predicted: float
    read_per_step: int
    read_predicted: int
    written_per_step: int
    written_predicted: int
    written_total: int
    stalls: dict[str, float]  # of all steps
    timeline: tuple[Busy, ...]  # of the last step, which waited:
    timeline_stalls: dict[str, float]
    output_dir: str
