"""What the launching thread does itself with the host's memory, as it is counted."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fuyou_cli.engine.host_work import HostWork
from fuyou_cli.planner.host_work import host_work
from fuyou_cli.swap import kernels

from .families import gpt2, llama
from .rig import Rig, Shape, Subject


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(llama(num_hidden_layers=3), Shape())


def test_bytes_read_and_written_by_kind() -> None:
    work = HostWork()
    work.copied("inputs staged", torch.zeros(3, 5))
    work.copied("inputs staged", torch.zeros(2, dtype=torch.bfloat16))
    assert work.take() == {"inputs staged": 2 * 60 + 2 * 4}
    assert work.take() == {}


class _Watched:
    """The native library, and who calls its kernels."""

    def __init__(self, library: Any) -> None:
        self._library, self.callers = library, dict[str, set[int]]()

    def __getattr__(self, name: str) -> Any:
        self.callers.setdefault(name, set()).add(threading.get_ident())
        return getattr(self._library, name)


@pytest.mark.parametrize("mode", ["in_place", "redo"])
def test_the_launching_thread_sums_nothing(mode: Any, subject: Subject, tmp_path: Path, monkeypatch: Any) -> None:
    """In redo what was written of gradients is named by its sum, which the daemon makes."""
    with Rig(subject, tmp_path, device="emulated", gradients="ssd", store_mode=mode) as rig:
        watched = _Watched(kernels.lib)
        monkeypatch.setattr(kernels, "lib", watched)
        rig.step(*next(subject.batches(1)), 1, last=True)
        records = rig.executor.residency.records
        rig.executor.residency.wait_until(lambda: all(r.gradient_write is None for r in records), "the test")
        monkeypatch.undo()
        assert watched.callers.keys() == {"fy_sum_squares"}
        assert threading.get_ident() not in watched.callers["fy_sum_squares"]
        for stage in rig.owning_stages():
            extent = rig.plan.stages[stage.index].gradients_extent
            assert extent is not None
            rig.daemon.wait(rig.daemon.read(rig._window.offset, extent.offset, extent.size))
            total = kernels.checksum(rig.memory.arena.view(rig._window.offset, extent.size))
            assert records[stage.index].gradients_sum == (total if mode == "redo" else None)
        rig.executor.drain()


# ---- as a plan charges it --------------------------------------------------------------------------------------------


def _by_place(rig: Rig, work: dict[int, Any]) -> dict[tuple[str, str], dict[str, int]]:
    """By phase and stage; pieces of an embedding together, for what is in which depends on the ids."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for visit in rig.executor.schedule.visits:
        stage = rig.spec.stages[visit.stage]
        place = found.setdefault((visit.phase, "embedding" if stage.kind == "embedding" else stage.name), {})
        for kind, size in work[visit.index].items():
            place[kind] = place.get(kind, 0) + size
    return found


@pytest.mark.parametrize("family", ["llama", "tied", "gpt2"])
@pytest.mark.parametrize("vocabulary", [0, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "unclipped"])
def test_the_plan_charges_what_the_launching_thread_does(
    family: str, vocabulary: int, dtype: Any, clip: float | None, tmp_path: Path
) -> None:
    """Visit by visit, byte by byte."""
    config = gpt2() if family == "gpt2" else llama(tie_word_embeddings=family == "tied")
    subject = Subject(config, Shape(dtype=dtype, vocabulary=vocabulary))
    with Rig(subject, tmp_path, device="emulated", clip=clip) as rig:
        counted = dict[int, Any]()
        rig.executor.after_visit = lambda visit: counted.__setitem__(visit.index, rig.executor.host_work.take())
        rig.run(2)
        charged = {visit.index: host_work(rig.spec, subject.numerics, visit) for visit in rig.executor.schedule.visits}
        assert _by_place(rig, counted) == _by_place(rig, charged)
        assert rig.executor.host_work.take() == {}
