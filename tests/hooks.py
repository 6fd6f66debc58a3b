"""Does things in a run's own process at a given step: a test that watches from outside may come too late."""

from __future__ import annotations

_DOING = """
import os
from pathlib import Path
from fuyou_cli.training.run_log import JsonlLog
logged = JsonlLog.step
def log_and_do(log, report):
    logged(log, report)
    if report.step == {step}:
        {action}
JsonlLog.step = log_and_do
"""


def doing(action: str, step: int) -> str:
    """Returns a program to be run before the command: it does `action` (a statement) as soon as `step` is in the log."""
    return _DOING.format(step=step, action=action)
