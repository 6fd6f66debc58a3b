"""Times in turns, and what other programs do to them."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.cli.bench import _beside_others
from fuyou_cli.machine.measure import timing as others
from fuyou_cli.machine.measure.timing import (
    DISTURBED,
    LEAST,
    Action,
    Turn,
    counted,
    in_turns,
    launch_seconds,
    left_out,
    mean_seconds,
    rates_of,
)
from fuyou_cli.machine.measure.whole import BenchReport
from fuyou_cli.machine.profile import assumed_hardware

# ---- others ----------------------------------------------------------------------------------------------------------
# Tests that rates found beside other programs say so.


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


# ---- turns -----------------------------------------------------------------------------------------------------------
# Tests which turns of a measurement count, and what rates they give.


_CORES = st.lists(st.floats(min_value=0.0, max_value=2.0), min_size=1, max_size=20)


def _turns(*cores: float) -> list[Turn]:
    """Makes turns whose only action takes a second for every core that others use, and one more."""
    return [Turn(seconds=(1.0 + used,), others=used) for used in cores]


@given(_CORES)
def test_quiet_turns_count_and_else_the_fastest(cores: list[float]) -> None:
    """One that waits for others is several times too slow."""
    quiet = [used for used in cores if used <= DISTURBED]
    action = Action(name="forward", run=lambda: None, amount=6.0, share=1.0)
    rate = rates_of([action], counted(_turns(*cores)), "FLOP/s", "")[0]
    if len(quiet) >= min(LEAST, len(cores)):
        assert rate.value == pytest.approx(6 / (1 + statistics.median(quiet)), rel=0.01) and rate.repeats == len(quiet)
    else:
        assert rate.value == rate.high == 6 / (1 + min(cores)) and rate.repeats == len(cores)


def test_a_disturbed_turn_changes_no_rate() -> None:
    action = Action(name="forward", run=lambda: None, amount=6.0, share=1.0)
    alone, beside = _turns(0.0, 0.0, 0.0), _turns(0.0, 0.0, 0.0, 1.4)
    values = [rates_of([action], counted(turns), "FLOP/s", "")[0] for turns in (alone, beside)]
    assert [(rate.value, rate.low, rate.repeats) for rate in values] == [(6.0, 6.0, 3)] * 2
    assert left_out(alone) == "" and left_out(beside) == ", 1 of 4 turns disturbed by other programs"


def test_every_action_has_its_repeats_in_every_turn() -> None:
    done = {"a": 0, "b": 0}

    def action(name: str) -> Action:
        def run() -> None:
            done[name] += 1

        return Action(name=name, run=run, amount=1.0, share=0.5)

    turns = in_turns([action("a"), action("b")], torch.device("cpu"), 0.01)
    assert turns and all(len(turn.seconds) == 2 and min(turn.seconds) > 0 for turn in turns)
    assert min(done.values()) >= 1 + len(turns)  # the first repeat is not counted


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Holds the seconds of a clock that only actions move, whatever the machine's load."""
    passed = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: passed[0])
    return passed


def test_a_gpu_is_waited_for_once_after_all_repeats_of_a_turn(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    waited: list[int] = []
    done: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(len(done)))

    def run() -> None:
        done.append(0)
        clock[0] += 0.001

    assert mean_seconds(run, 0.05, torch.device("cuda")) == pytest.approx(0.001)
    assert waited == [1, 51]  # the first repeat tells how many the others are


def test_a_gpu_works_before_it_is_timed(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    begun: list[float] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def run() -> None:
        begun.append(clock[0])
        clock[0] += 0.001

    turns = in_turns([Action(name="a", run=run, amount=1.0, share=1.0)], torch.device("cuda"), 0.05)
    assert turns and begun[-1] - begun[0] >= 0.099  # as long again as it is timed


def test_a_launch_takes_what_the_host_takes(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    """Leaves out the device's own time, and the first launch. A processor computes while it launches."""
    repeats: list[float] = []

    def run() -> None:
        repeats.append(0.001 * (len(repeats) + 1) if repeats else 0.0001)
        clock[0] += repeats[-1]

    def wait(device: torch.device) -> None:
        clock[0] += 0.5

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    assert launch_seconds(run, torch.device("cuda")) == pytest.approx(0.002)
    assert launch_seconds(run, torch.device("cpu")) == 0.0
