"""The benches: a bar is judged only where the machine was quiet, and the exit code
says it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import bench_adamw
import bench_host
import bench_io
import bench_search
import count_calls
import pytest
from proof import verdicts
from proof.verdicts import exit_code

IO_OPTIONS = argparse.Namespace(pairs=3, block="1MiB", depth=32, json=None)


def _pairs(rate: float, *, others: float, fio: bool = True) -> list[bench_io.Pair]:
    theirs = bench_io.Sample(rate=1e9, cpu=1.0) if fio else None
    return [bench_io.Pair(mine=bench_io.Sample(rate=rate * 1e9, cpu=1.0), theirs=theirs, others=others)] * 3


@pytest.mark.parametrize(
    ("rate", "others", "fio", "said", "code"),
    [
        (1.0, 0.0, True, "rate 1.00x (bar 0.95: holds)", 0),
        (0.9, 0.0, True, "rate 0.90x (bar 0.95: MISSED)", 1),
        (1.0, 1.0, True, "rate 1.00x (bar 0.95: not judged: NOT QUIET)", 3),
        (0.9, 1.0, True, "rate 0.90x (bar 0.95: not judged: NOT QUIET)", 3),
        (1.0, 0.0, False, "fio is not installed", 3),
    ],
)
def test_io_is_judged_when_quiet(
    rate: float, others: float, fio: bool, said: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = bench_io.judge("read", _pairs(rate, others=others, fio=fio), IO_OPTIONS)
    assert said in capsys.readouterr().out
    assert exit_code(rows) == code


@pytest.mark.parametrize(
    ("rate", "others", "said", "code"),
    [
        (1.0, 0.0, "fuyou / torch: 1.00x (bar 0.95: holds)", 0),
        (0.9, 0.0, "fuyou / torch: 0.90x (bar 0.95: MISSED)", 1),
        (1.0, 1.0, "fuyou / torch: 1.00x (bar 0.95: not judged: NOT QUIET)", 3),
    ],
)
def test_adamw_is_judged_when_both_sides_were_quiet(
    rate: float, others: float, said: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = {"fuyou": [(1.0 / rate, 0.0)] * 3, "torch": [(1.0, 0.0)] * 2 + [(1.0, others)]}
    rates = bench_adamw.print_sides(samples, 1, {"fuyou": 28, "torch": 28})
    row = bench_adamw.judge("torch", rates, samples, 0.95)
    assert said in capsys.readouterr().out
    assert exit_code([row]) == code


@pytest.mark.parametrize(
    ("wall", "processor", "verdict", "code"),
    [
        (1.9, 1.9, "pass", 0),
        (1.9, 1.0, "pass", 0),  # others had its core, and it was short enough all the same
        (2.0, 1.9, "FAIL", 1),
        (3.0, 2.5, "NOT QUIET", 3),
    ],
)
def test_a_search_is_judged_unless_others_had_its_core(wall: float, processor: float, verdict: str, code: int) -> None:
    samples = tuple(bench_search.Sample(wall=wall * factor, processor=processor * factor) for factor in (0.5, 1.0, 9.0))
    row = bench_search.judge(
        bench_search.Timed(case=bench_search.Case(model="some"), stages=9, placed=7, visits=8, samples=samples)
    )
    assert (row.verdict, row.asked, row.measured) == (verdict, "< 2 s", f"{wall:.2f} s")
    assert row.note.endswith("9 stages, 7 stages of choices placed, 8 visits simulated")
    assert exit_code([row]) == code


def test_the_search_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    case = bench_search.Case(model="llama-3.2-1b", settings=(bench_search.UNCLIPPED,))
    monkeypatch.setattr(bench_search, "QUICK", (case,))
    code = bench_search.main(["--quick", "--results", str(tmp_path)])
    said = capsys.readouterr().out
    assert said.startswith("python scripts/bench_search.py --quick ") and "llama-3.2-1b, train.clip_grad_norm=null" in said
    (row,) = json.loads((tmp_path / "bench_search-quick.json").read_text())["rows"]
    assert code == {"pass": 0, "FAIL": 1}.get(row["verdict"], 3)  # how long it takes is for the bench to say
    assert row["values"]["placed"] > 1 and 0 < row["values"]["samples"][0]["wall"] < 60
    assert {case.model for case in bench_search.WHOLE} == {"llama-3.1-405b", "olmo-2-13b"} and len(bench_search.WHOLE) == 9


def test_the_output_of_a_bench_names_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--dir", str(tmp_path), "--size", "16MiB", "--pairs", "1", "--modes", "read", "--backend", "threads"]
    monkeypatch.setattr(sys, "argv", ["bench_io.py", *words])
    monkeypatch.setattr(bench_io.shutil, "which", lambda _: None)
    monkeypatch.setattr(verdicts, "commit", lambda: "1234567890")
    assert bench_io.main() == 3
    assert "commit 1234567890, " in capsys.readouterr().out.splitlines()[0]


def test_the_launching_thread_is_judged_by_what_it_takes_beyond_transformers() -> None:
    """Turn by turn: a slow turn is slow for both."""
    ways = bench_host.ways_of("immediate")
    turn = {(who, phase): 1.0 for who in ways for phase in bench_host.BARS}
    turn |= {("transformers", phase): 0.25 for phase in bench_host.BARS}
    turns = [{key: value * speed for key, value in turn.items()} for speed in (1.0, 1.0, 9.0)]
    verdicts = {row.what.partition(":")[0]: (row.measured, row.verdict) for row in bench_host.rows_of(turns, ways)}
    assert verdicts["device immediate, forward"] == ("0.750", "FAIL")
    assert verdicts["device immediate, backward"] == ("0.750", "pass")
    assert verdicts["device cpu, forward"] == ("0.750", "reported")


def test_an_immediate_device_has_a_memory_of_its_own(tmp_path: Path) -> None:
    """The batch stays on it, and so do outputs."""
    ways = bench_host.ways_of("immediate")
    name = "device immediate, all outputs kept on it"
    streamed = bench_host.Streamed(tmp_path, name, ways[name])
    with streamed.rig as rig:
        assert isinstance(rig.device, bench_host.Immediate) and rig.device.separate and rig.plan.batch_on_device
        assert min(streamed.step().values()) > 0


def test_count_calls_tells_a_callback_from_a_call(tmp_path: Path) -> None:
    """A call down is no climb, the callback that comes of it is one; what runs on import is not counted."""
    (tmp_path / "core").mkdir()
    (tmp_path / "cli").mkdir()
    low, high, other = tmp_path / "core" / "low.py", tmp_path / "cli" / "high.py", tmp_path / "cli" / "other.py"
    low.write_text("def ask(answer):\n    return answer()\n")
    high.write_text("class Executor:\n    def step(self, ask):\n        return ask(lambda: 1) + 1\n")
    other.write_text("found = sorted([2, 1])\n")
    names: dict[str, Any] = {}
    profile = count_calls.Profile(tmp_path, {"core": 0, "cli": 8})
    sys.setprofile(profile)
    try:
        for path in (low, high, other):
            exec(compile(path.read_text(), str(path), "exec"), names)
        names["Executor"]().step(names["ask"])
    finally:
        sys.setprofile(None)
    assert profile.before == {"files": 0, "calls": 0, "climbs": 0, "climbing calls": 0, "climbs to cli": 0}
    assert profile.counted() == {"files": 2, "calls": 3, "climbs": 1, "climbing calls": 1, "climbs to cli": 1}
    assert list(profile.climbs) == [(("core/low.py", "ask"), ("cli/high.py", "Executor.step.<locals>.<lambda>"))]
