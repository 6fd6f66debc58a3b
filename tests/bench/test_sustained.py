"""Tests `fuyou bench --sustained`: when the rate has settled, how much is written, and that nobody is surprised by it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from fuyou_cli.cli import bench
from fuyou_cli.core.errors import OutOfSpaceError, UsageError
from fuyou_cli.core.units import GiB, MiB
from fuyou_cli.machine.measure import store_rates as measure_sustained
from fuyou_cli.machine.measure.store_rates import Pace, burst_windows, most_written, new_store, settled
from fuyou_cli.machine.measure.store_rates import measure_sustained as measured
from fuyou_cli.machine.measure.timing import Findings
from fuyou_cli.machine.measure.whole import BenchReport
from fuyou_cli.machine.profile import assumed_hardware, keep
from fuyou_cli.spec.hardware import HardwareProfile

FAST, SLOW = [6.9, 6.8, 7.0, 6.9, 6.9, 6.7], [1.4, 1.5, 1.35, 1.4]


def fell(found: Findings) -> bool:
    return "sustained_write" in found.figures


@pytest.mark.parametrize(
    ("rates", "over", "burst"),
    [
        (FAST + SLOW, True, 6),
        ([*FAST, 3.0, *SLOW], True, 6),  # nearer to the slow rate: part of a window was fast
        ([*FAST, 5.0, *SLOW], True, 7),
        ([*FAST[:2], 1.0, *FAST[2:], *SLOW], True, 7),  # a hiccup is not the end of the fast region
        (FAST + FAST, False, 0),
        ([*FAST, 6.0, 4.5, 3.0, 1.4], False, 0),  # still falling
        (FAST[:3] + SLOW, False, 0),  # too few to tell
        ([*FAST, 6.0, 6.1, 6.0, 6.1], False, 0),  # a little slower is not another region
        ([], False, 0),
    ],
)
def test_when_a_rate_has_settled(rates: list[float], over: bool, burst: int) -> None:
    assert settled(rates) is over
    assert burst_windows(rates) == burst


def test_a_quarter_of_what_is_free_at_most() -> None:
    assert most_written(100 * GiB) == 25 * GiB
    assert most_written(40 * GiB) == 10 * GiB
    assert most_written(1 << 50) <= 512 * 10**9 < most_written(1 << 50, 3) <= 3 * 512 * 10**9
    with pytest.raises(OutOfSpaceError, match="too little"):
        most_written(40 * GiB - 1)


def test_measured_for_real_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_sustained, "WINDOW", 16 * MiB)
    heard: list[str] = []
    found = measured(tmp_path, free=4 * 12 * 16 * MiB, progress=heard.append)
    assert list(tmp_path.iterdir()) == []
    windows = len(heard)
    assert 8 <= windows <= 10 and 16 * MiB * windows <= found.written_bytes <= 12 * 16 * MiB
    assert fell(found) != any("did not fall" in note for note in found.notes)


def test_at_once_is_measured_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the last windows for a fall, whatever this drive does."""
    monkeypatch.setattr(measure_sustained, "WINDOW", 16 * MiB)
    monkeypatch.setattr(measure_sustained, "FALLEN", 1e9)
    monkeypatch.setattr(measure_sustained, "STEADY", 1e9)
    found = measured(tmp_path, free=4 * 12 * 16 * MiB)
    assert fell(found) and list(tmp_path.iterdir()) == [] and len(found.rates) == 3
    assert all(0 <= rate.low <= rate.value <= rate.high < 1e12 for rate in found.rates)
    assert max(rate.high for rate in found.rates) > 1e6  # windows as small as these may end before a write does, or a read


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes `drive(rates, most)`, which writes window after window at these rates, and is asked to show `most` of them."""

    def make(rates: list[float], most: int) -> None:
        monkeypatch.setattr(measure_sustained, "WINDOW", MiB)
        monkeypatch.setattr(measure_sustained, "MOST_BYTES", (most + measure_sustained.MIXED_WINDOWS) * MiB)
        monkeypatch.setattr(measure_sustained, "_window", lambda daemon, number: Pace(reading=0.0, writing=rates[number]))
        monkeypatch.setattr(measure_sustained, "_mixed", lambda daemon, number: Pace(reading=2.0, writing=1.0))

    return make


def free_for(windows: int) -> int:
    return 4 * (windows + measure_sustained.MIXED_WINDOWS) * MiB


def test_what_is_never_reached_is_not_found(tmp_path: Path, drive: Callable[..., None]) -> None:
    """The last of fast windows are no sustained rates, nor are those on the way down."""
    for rates in ([6.9] * 12, [*FAST, *FAST[:2], 6.0, 4.5, 3.0, 1.4]):
        drive(rates, most=100)
        found = measured(tmp_path, free=free_for(12))
        assert not fell(found) and found.figures["steady_bytes"] == 0
        assert len(found.notes) == 1 and "unknown" in found.notes[0]


def test_what_falls_is_found(tmp_path: Path, drive: Callable[..., None]) -> None:
    drive(FAST + SLOW, most=100)
    found = measured(tmp_path, free=free_for(12))
    assert found.notes == ()
    assert found.figures == {
        "sustained_write": 1.4, "sustained_read_mixed": 2.0, "sustained_write_mixed": 1.0, "burst_bytes": 6 * MiB,
        "steady_bytes": 0,
    }  # fmt: skip


def test_a_drive_that_does_not_fall_is_known_as_one(tmp_path: Path, drive: Callable[..., None]) -> None:
    drive([6.9] * 30, most=12)
    found = measured(tmp_path, free=free_for(100))
    assert not fell(found) and found.figures["steady_bytes"] == 12 * MiB and "never" in found.notes[0]
    half = measured(tmp_path, free=free_for(12), count=2)  # of what two drives may take
    assert half.figures["steady_bytes"] == 0
    assert measured(tmp_path, free=free_for(100), count=2).figures["steady_bytes"] > 12 * MiB


def test_what_is_kept_of_drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drive: Callable[..., None]) -> None:
    """Checks that a measurement that shows nothing takes nothing away, and one that shows that there is no fall does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    profile = replace(assumed_hardware(tmp_path), measured="2026-01-02")

    def kept(rates: list[float], most: int) -> HardwareProfile:
        drive(rates, most=most)
        report = BenchReport(profile=profile, rates=(), notes=(), quick=True, seconds=1.0, written_bytes=0)
        found = measured(tmp_path, free=free_for(12), count=1)
        return keep(report.with_found(found).profile, tmp_path, say=print)

    nothing = kept([6.9] * 12, most=100)
    assert (nothing.sustained_write, nothing.steady_bytes, nothing.slows_down) == (0.0, 0, False)
    fallen = kept(FAST + SLOW, most=100)
    assert (fallen.sustained_write, fallen.burst_bytes, fallen.slows_down) == (1.4, 6 * MiB, True)
    assert kept([6.9] * 12, most=100) == fallen
    steady = kept([6.9] * 12, most=12)
    assert (steady.sustained_write, steady.steady_bytes, steady.slows_down) == (0.0, 12 * MiB, False)
    assert steady.digest() == nothing.digest()
    assert keep(profile, tmp_path, say=print).steady_bytes == 12 * MiB


def test_a_store_over_two_folders(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with new_store((tmp_path / "a", tmp_path / "b"), 64 * MiB) as (_, store):
        assert [path.parent.parent.name for path in store.paths] == ["a", "b"]
        assert [path.stat().st_size for path in store.paths] == [32 * MiB, 32 * MiB]
    assert list((tmp_path / "a").iterdir()) == list((tmp_path / "b").iterdir()) == []
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="cannot write to"), new_store((tmp_path / "a", tmp_path / "file"), 64 * MiB):
        pass
    assert list((tmp_path / "a").iterdir()) == [] and (tmp_path / "file").read_text() == "mine"


def test_nobody_is_asked_nothing_is_written(
    tmp_path: Path, fuyou_there: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    least = 4 * (measure_sustained.LEAST_WINDOWS + measure_sustained.MIXED_WINDOWS) * measure_sustained.WINDOW
    if bench.disk.free_space(tmp_path) < least:
        pytest.skip("too little is free here for it to ask")
    done = fuyou_there("bench", "--sustained", "--dir", tmp_path / "store")
    assert done.returncode == 2 and "add --yes" in done.stderr
    assert "GB to " in done.stderr.splitlines()[0] and "removed" in done.stderr.splitlines()[0]
    assert not (tmp_path / "store").exists() and done.stdout == ""


@pytest.mark.parametrize("said", ["n\n", "\n", ""])
def test_a_no_is_a_no(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench.disk, "striped_space", lambda *places: 10**12)
    with pytest.raises(UsageError, match="nothing was measured: there is no terminal"):
        bench.run_bench(tmp_path, quick=True, json_output=False, sustained=True)
    monkeypatch.setattr("sys.stdin", StringIO(said))
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert bench.run_bench(tmp_path, quick=True, json_output=False, sustained=True) is None
    asked = capsys.readouterr().err
    assert asked.count("[y/N]") == 1 and "nothing was measured" in asked and list(tmp_path.iterdir()) == []
