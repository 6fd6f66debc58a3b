"""`fuyou bench --sustained`: when the rate has settled, how much is written, and that nobody is surprised by it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fuyou_cli.cli import bench, measure_sustained
from fuyou_cli.cli.measure_store import new_store
from fuyou_cli.cli.measure_sustained import burst_windows, most_written, settled
from fuyou_cli.cli.measure_sustained import measure_sustained as measured
from fuyou_cli.core.errors import OutOfSpaceError, UsageError
from fuyou_cli.core.units import GiB, MiB

FAST, SLOW = [6.9, 6.8, 7.0, 6.9, 6.9, 6.7], [1.4, 1.5, 1.35, 1.4]


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
    assert most_written(1 << 50) <= 512 * 10**9
    with pytest.raises(OutOfSpaceError, match="too little"):
        most_written(40 * GiB - 1)


def test_measured_for_real_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_sustained, "WINDOW", 16 * MiB)
    heard: list[str] = []
    found = measured(tmp_path, free=4 * 12 * 16 * MiB, progress=heard.append)
    assert list(tmp_path.iterdir()) == []
    windows = len(heard)
    assert 8 <= windows <= 10 and 16 * MiB * windows < found.written_bytes <= 12 * 16 * MiB
    for rate in (found.write, found.read_mixed, found.write_mixed):
        assert 1e6 < rate.low <= rate.value <= rate.high < 1e12
    assert (found.burst_bytes > 0) == (not any("did not fall" in note for note in found.notes))


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
    if bench.probe.free_space(tmp_path) < least:
        pytest.skip("too little is free here for it to ask")
    done = fuyou_there("bench", "--sustained", "--dir", tmp_path / "store")
    assert done.returncode == 2 and "add --yes" in done.stderr
    assert "GB to " in done.stderr.splitlines()[0] and "removed" in done.stderr.splitlines()[0]
    assert not (tmp_path / "store").exists() and done.stdout == ""


def test_a_no_is_a_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    questions: list[str] = []
    monkeypatch.setattr(bench.probe, "striped_space", lambda *places: 10**12)
    monkeypatch.setattr(bench, "confirm", lambda question: bool(questions.append(question)))
    assert bench.run_bench(tmp_path, quick=True, json_output=False, sustained=True) is None
    assert len(questions) == 1 and "nothing was measured" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(bench, "confirm", lambda question: None)
    with pytest.raises(UsageError, match="no terminal"):
        bench.run_bench(tmp_path, quick=True, json_output=False, sustained=True)
