"""Tests that rates found beside other programs say so."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fuyou_cli.cli.bench import _beside_others
from fuyou_cli.machine import background_load as others
from fuyou_cli.machine.measure.whole import BenchReport
from fuyou_cli.machine.profile import assumed_hardware


def stat(root: Path, *ticks: int) -> None:
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/stat").write_text(f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 2 3\n")


def test_what_others_use_is_what_we_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, own = [100.0], [5.0]
    monkeypatch.setattr(others.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(others, "own_seconds", lambda: own[0])
    tick = others.os.sysconf("SC_CLK_TCK")
    # user nice system idle iowait irq softirq steal guest guest_nice
    stat(tmp_path, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    seen = others.BackgroundLoad(tmp_path)
    clock[0], own[0] = 110.0, 9.0
    stat(tmp_path, 5 * tick, tick, 2 * tick, 99 * tick, 99 * tick, 0, tick, 3 * tick, 0, 0)
    assert seen.cores() == pytest.approx((12 - 4) / 10)  # idle and waiting count nothing, what was stolen does
    own[0] = 99.0  # a child that had run before we looked
    assert seen.cores() == 0.0
    (tmp_path / "proc/stat").unlink()
    assert others.BackgroundLoad(tmp_path).cores() == 0.0


def test_a_process_that_spins_is_seen() -> None:
    seen = others.BackgroundLoad()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        deadline, cores = time.monotonic() + 20.0, 0.0
        while cores <= 0.2 and time.monotonic() < deadline:
            time.sleep(0.05)
            cores = seen.cores()
        now = others.cores_now()
        spinning.kill()
    assert cores > 0.2 and now > 0.2


def test_a_busy_machine_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(others.os, "cpu_count", lambda: 2)
    profile = replace(assumed_hardware(tmp_path), dram=4e10)
    report = BenchReport(profile=profile, rates=(), notes=("one",), quick=True, seconds=1.0, written_bytes=0)
    quiet, busy = _beside_others(report, 0.3), _beside_others(report, 1.2)
    assert quiet.notes == ("one",) and quiet.profile == replace(profile, others_cores=0.3)
    assert busy.notes[1].startswith("other programs used 1.2 cores meanwhile")
    # No rate but the memory's: what is slower then may wait for cores.
    assert busy.profile.digest() == replace(profile, dram=0.0).digest() != profile.digest()
    monkeypatch.setattr(others.os, "cpu_count", lambda: 64)
    assert not others.are_busy(5.0) and others.are_busy(7.0)
