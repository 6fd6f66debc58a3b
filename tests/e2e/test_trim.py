"""Freed memory goes back to the system after every visit, and between micro-batches too where the process is large."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fuyou_cli.cli import probe
from fuyou_cli.training.run import Run

from .conftest import Project
from .running import prepared_run

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("short", [False, True])
def test_between_micro_batches_only_where_memory_is_short(new_project: Callable[..., Project], short: bool) -> None:
    prepared = prepared_run(new_project(f"short-{short}", {"train.max_steps": 2}))
    size = prepared.plan.predicted.cpu_peak if short else 1
    calls: list[str] = []
    with Run(prepared, memory_now=lambda: size, free_space=probe.free_space, trim=lambda: calls.append("trim")) as run:
        run.load(lambda count: None)
        between = run.executor.between_micro_batches

        def count_and_look() -> None:
            calls.append("between")
            between()

        run.executor.between_micro_batches = count_and_look
        run.train(lambda report: None)
        visits = 2 * len(run.executor.schedule.visits)
    assert calls.count("between") > visits // 2
    assert calls.count("trim") == visits + (calls.count("between") if short else 0)
