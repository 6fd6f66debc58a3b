"""Tests measuring before a plan: however it ends, nothing is left of it, and nothing that may have written is tried twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fuyou_cli.machine import profile
from fuyou_cli.machine.measure import timing
from fuyou_cli.machine.profile import assumed_hardware, hardware_for, keep
from fuyou_cli.spec.hardware import StageRate

ROOT = Path(__file__).resolve().parents[2]

# A bench that has made its file and goes on for ever.
MEASURING = """
import sys, time
from fuyou_cli.cli import bench
from fuyou_cli.machine.measure.store_rates import new_store

def measure(*places, **options):
    with new_store(places, 64 << 20):
        time.sleep(600)

bench.measure = measure
from fuyou_cli.cli.app import main
main(["bench", "--dir", sys.argv[1]])
"""

# A bench that is ended in the moment in which its daemon is there and nobody holds it yet.
OPENING = """
import os, signal, sys
from fuyou_cli.cli import bench
from fuyou_cli.machine.measure import store_rates

class Daemon(store_rates.SwapDaemon):
    def __init__(self, *given):
        super().__init__(*given)
        os.kill(os.getpid(), signal.SIGTERM)

def measure(*places, **options):
    with store_rates.new_store(places, 64 << 20):
        raise AssertionError("it goes on")

store_rates.SwapDaemon, bench.measure = Daemon, measure
from fuyou_cli.cli.app import main
main(["bench", "--dir", sys.argv[1]])
"""

# One that has made its file, and is deaf to what it is asked.
DEAF = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
made = pathlib.Path(sys.argv[1]) / f"fuyou-bench-{os.getpid()}-abc"
made.mkdir()
(made / "store.bin").write_bytes(b"x")
time.sleep(600)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_a_bench_that_is_ended_removes_its_files(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", MEASURING, str(tmp_path)], env=environment(), stderr=subprocess.PIPE, text=True
    )
    while not list(tmp_path.glob("*/store.bin")):
        assert child.poll() is None
        time.sleep(0.05)
    assert [path.name.startswith(f"fuyou-bench-{child.pid}-") for path in tmp_path.iterdir()] == [True]
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate()
    assert child.returncode == 130 and "interrupted" in err
    assert list(tmp_path.iterdir()) == []


def test_a_bench_that_is_ended_while_it_opens_its_store(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", OPENING, str(tmp_path)], env=environment(), capture_output=True, text=True, check=False
    )
    assert (ended.returncode, list(tmp_path.iterdir())) == (130, []), ended.stderr


def test_a_bench_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended and its files removed; what somebody else measures there stays."""
    (tmp_path / "fuyou-bench-1-abc").mkdir()
    monkeypatch.setattr(profile, "PATIENCE", 1.0)
    with pytest.raises(subprocess.TimeoutExpired):
        profile._run([sys.executable, "-c", DEAF, str(tmp_path)], environment(), [tmp_path])
    assert {path.name for path in tmp_path.iterdir()} == {"fuyou-bench-1-abc"}


@pytest.mark.parametrize(
    ("code", "err", "said"),
    [
        (-9, "", "`fuyou bench` was killed, usually because memory ran out"),
        (-11, "", "`fuyou bench` was ended by signal 11"),
        (1, "warning: x\n", "`fuyou bench` failed, exit code 1"),
        (1, "error: no room\n  help: make some\n", "no room"),
    ],
)
def test_why_nothing_was_measured(code: int, err: str, said: str) -> None:
    assert profile._reason(err, code) == said


@pytest.mark.parametrize(("first", "ways"), [((0, ""), 1), ((1, "too long"), 1), ((2, "it has experts"), 2)])
def test_the_machine_alone_is_measured_where_the_model_was_refused(
    first: tuple[int, str], ways: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Does not measure after a bench that may have written its 2 GB."""
    asked: list[list[str]] = []

    def measured(arguments: list[str], directories: Any) -> tuple[int, str]:
        asked.append(arguments)
        return first if len(asked) == 1 else (0, "")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(profile, "_measured", measured)
    recipe = SimpleNamespace(offload_directories=lambda environment: (tmp_path,))
    profile.measure_once(SimpleNamespace(recipe=recipe, path="recipe.yaml", overrides=[]), "cpu", say=print)  # type: ignore[arg-type]
    assert len(asked) == ways and asked[0][0] == "recipe.yaml" and asked[-1][0] == ("recipe.yaml" if ways == 1 else "--dir")


def test_nothing_is_measured_that_could_not_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(profile, "_measured", lambda *_: pytest.fail("it was measured"))
    recipe = SimpleNamespace(offload_directories=lambda environment: (tmp_path,))
    profile.measure_once(SimpleNamespace(recipe=recipe, path="recipe.yaml", overrides=[]), "cpu", say=print)  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert said.startswith("note: rates are assumed: ") and f"{tmp_path}/file/fuyou: Not a directory" in said


RATE = StageRate(kind="block", dtype="bfloat16", hidden=8, params=8, tokens=8, forward=1.0, backward=1.0)


@pytest.mark.parametrize(
    ("then", "now", "again", "said"),
    [
        (0.1, 1.6, False, ""),  # measured on a quiet machine: nobody looks whether it is idle now
        (1.6, 1.5, False, "note: other programs used 1.6 cores while this machine was measured, and use 1.5 now: a run that"),
        (1.6, 0.1, True, "other programs used 1.6 cores while this machine was measured; it is idle now\nmeasuring this"),
    ],
)
def test_what_was_measured_beside_others_is_measured_again_when_it_is_quiet(
    then: float, now: float, again: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(timing.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(profile, "cores_now", lambda: now)
    found = replace(assumed_hardware(tmp_path), measured="2026-01-02")
    other = replace(RATE, hidden=16)
    keep(replace(found, others_cores=then, matmul_flops=1.0, stage_rates=(RATE, other)), tmp_path, say=print)
    asked: list[list[str]] = []

    def measured(arguments: list[str], directories: Any) -> tuple[int, str]:
        asked.append(arguments)
        keep(replace(found, others_cores=now, matmul_flops=2.0, stage_rates=(replace(RATE, forward=2.0),)), tmp_path, say=print)
        return 0, ""

    monkeypatch.setattr(profile, "_measured", measured)
    recipe = SimpleNamespace(offload_directories=lambda environment: (tmp_path,))
    loaded: Any = SimpleNamespace(recipe=recipe, path="recipe.yaml", overrides=[])
    profile.measure_once(loaded, "cpu", say=print)
    assert len(asked) == again and capsys.readouterr().out.startswith(said)
    kept = hardware_for(tmp_path, device="cpu", say=print)
    assert kept.matmul_flops == 1.0 + again
    assert [rate.forward for rate in kept.stage_rates] == ([2.0] if again else [1.0, 1.0])  # nothing that others slowed down
    if again:
        profile.measure_once(loaded, "cpu", say=print)
        assert len(asked) == 1


def test_a_machine_that_is_busy_the_first_time_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(timing.os, "cpu_count", lambda: 2)

    def measured(arguments: list[str], directories: Any) -> tuple[int, str]:
        keep(replace(assumed_hardware(tmp_path), measured="2026-01-02", others_cores=1.2), tmp_path, say=print)
        return 0, ""

    monkeypatch.setattr(profile, "_measured", measured)
    recipe = SimpleNamespace(offload_directories=lambda environment: (tmp_path,))
    profile.measure_once(SimpleNamespace(recipe=recipe, path="recipe.yaml", overrides=[]), "cpu", say=print)  # type: ignore[arg-type]
    said = capsys.readouterr().out.splitlines()
    assert (
        said[0].startswith("measuring this machine, once")
        and "used 1.2 cores" in said[-1]
        and "idle measures again" in said[-1]
    )
