"""Makes up reports of steps and runs: a test names the figures that count in them."""

from __future__ import annotations

from typing import Any

from fuyou_cli.spec.plan import Plan
from fuyou_cli.training.report import RunReport, StepReport, Steps, run_report


def step_report(step: int = 1, **figures: Any) -> StepReport:
    usual: dict[str, Any] = dict(
        total_steps=10, loss=1.0, lr=1e-5, grad_norm=None, tokens=100, batch_tokens=128, seconds=2.0, tflops=0.5, ram_now=1,
        ram_peak=2, read_bytes=100, written_bytes=50, update_cpu_seconds=0.1, io_cpu_seconds=0.1, stalls={},
    )  # fmt: skip
    return StepReport(step=step, **{**usual, **figures})


def report_of_run(steps: Steps, plan: Plan, **figures: Any) -> RunReport:
    """Sums up steps that ran as `plan` says."""
    usual: dict[str, Any] = dict(
        losses=[1.0], flops_per_token=60.0, seconds=1.0, ram_budget=plan.cpu_budget, ram_peak=1, written_total=1,
        output_dir="out", commit_interval=plan.commit_every if plan.has_apart_commits else None,
    )  # fmt: skip
    return run_report(steps, **{**usual, **figures})
