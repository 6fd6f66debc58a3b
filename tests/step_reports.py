"""Makes up the report of a step: a test names the figures that count in it."""

from __future__ import annotations

from typing import Any

from fuyou_cli.training.report import StepReport


def step_report(step: int = 1, **figures: Any) -> StepReport:
    usual: dict[str, Any] = dict(
        total_steps=10, loss=1.0, lr=1e-5, grad_norm=None, tokens=100, batch_tokens=128, seconds=2.0, tflops=0.5, ram_now=1,
        ram_peak=2, read_bytes=100, written_bytes=50, update_cpu_seconds=0.1, io_cpu_seconds=0.1, stalls={},
    )  # fmt: skip
    return StepReport(step=step, **{**usual, **figures})
