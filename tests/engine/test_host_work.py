"""What the launching thread does itself with the host's memory, as it is counted."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fuyou_cli.engine.host_work import HostWork
from fuyou_cli.swap import kernels

from .families import llama
from .rig import Rig, Shape, Subject


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(llama(num_hidden_layers=3), Shape())


def test_bytes_read_and_written_by_kind() -> None:
    work = HostWork()
    work.copied("inputs staged", torch.zeros(3, 5))
    work.copied("inputs staged", torch.zeros(2, dtype=torch.bfloat16))
    work.added(torch.zeros(7), torch.zeros(7, dtype=torch.bfloat16))
    work.read(torch.zeros(11, dtype=torch.bfloat16))
    assert work.take() == {"inputs staged": 2 * 60 + 2 * 4, "added": 2 * 28 + 14, "looked at": 22}
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
