"""Tests what the launching thread does itself with the host's memory, as it is counted."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from drawn import every

from fuyou_cli.planner.device import staged_bytes
from fuyou_cli.planner.schedule import Visit
from fuyou_cli.swap import kernels

from .families import gpt2, llama
from .rig import Rig, Shape, Subject


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(llama(num_hidden_layers=3), Shape())


class _Watched:
    """The native library, and who calls its kernels."""

    def __init__(self, library: Any) -> None:
        self._library, self.callers = library, dict[str, set[int]]()

    def __getattr__(self, name: str) -> Any:
        self.callers.setdefault(name, set()).add(threading.get_ident())
        return getattr(self._library, name)


def test_the_launching_thread_sums_nothing(subject: Subject, tmp_path: Path, monkeypatch: Any) -> None:
    with Rig(subject, tmp_path, device="emulated", gradients="ssd") as rig:
        watched = _Watched(kernels.lib)
        monkeypatch.setattr(kernels, "lib", watched)
        rig.step(*next(subject.batches(1)), 1, last=True)
        records = rig.executor.visits.residency.records
        rig.executor.visits.residency.wait_until(lambda: all(r.gradient_write is None for r in records), "the test")
        monkeypatch.undo()
        assert watched.callers.keys() == {"fy_sum_squares"}
        assert threading.get_ident() not in watched.callers["fy_sum_squares"]
        rig.executor.drain()


# ---- as a plan charges it --------------------------------------------------------------------------------------------


def _by_place(rig: Rig, work: dict[int, int]) -> dict[tuple[str, str], int]:
    """Sums by phase and stage; pieces of an embedding together, for what is in which depends on the ids."""
    found = Counter[tuple[str, str]]()
    for visit in rig.executor.visits.schedule.visits:
        stage = rig.spec.stages[visit.stage]
        found[visit.phase, "embedding" if stage.kind == "embedding" else stage.name] += work[visit.index]
    return dict(found)


@pytest.mark.parametrize(("family", "on_device"), every(2, product(["llama", "tied", "gpt2"], [True, False])))
@pytest.mark.parametrize(
    ("vocabulary", "dtype", "clip"), [(0, "float32", 0.5), (0, "bfloat16", None), (40, "float32", None), (40, "bfloat16", 0.5)]
)
def test_the_plan_charges_what_the_launching_thread_does(
    family: str, vocabulary: int, dtype: Any, clip: float | None, on_device: bool, tmp_path: Path
) -> None:
    """Compares visit by visit, byte by byte."""
    config = gpt2() if family == "gpt2" else llama(tie_word_embeddings=family == "tied")
    subject = Subject(config, Shape(dtype=dtype, vocabulary=vocabulary))
    with Rig(subject, tmp_path, device="emulated", clip=clip, batch_on_device=on_device) as rig:
        crossings, counted, before = rig.executor.visits.crossings, dict[int, int](), 0

        def after(visit: Visit) -> None:
            nonlocal before
            counted[visit.index], before = crossings.staged - before, crossings.staged

        rig.executor.after_visit = after
        rig.run(2)
        assert before == crossings.staged
        visits = rig.executor.visits.schedule.visits
        charged = {visit.index: staged_bytes(rig.spec, subject.numerics, visit, on_device=on_device) for visit in visits}
        assert _by_place(rig, counted) == _by_place(rig, charged)
