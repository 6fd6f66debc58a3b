"""Tests that `fuyou bench` measures for real, on little data, and leaves nothing behind."""

from __future__ import annotations

import io
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from fuyou_cli.cli.bench import bench_json, run_bench, show_bench
from fuyou_cli.core.errors import OutOfSpaceError, UsageError
from fuyou_cli.core.units import MiB, gib
from fuyou_cli.machine import profile
from fuyou_cli.machine.measure import memory_rates as measure_update
from fuyou_cli.machine.measure import store_rates as measure_store
from fuyou_cli.machine.measure.memory_rates import measure_adamw, measure_shared, measure_sums
from fuyou_cli.machine.measure.timing import Rate, rate_of
from fuyou_cli.machine.measure.whole import BenchReport
from fuyou_cli.machine.profile import read_profile
from fuyou_cli.swap.daemon import SwapDaemon


def check(rate: Rate) -> None:
    assert 0 < rate.low <= rate.value <= rate.high and rate.repeats >= 1, rate


def test_the_median_and_its_range() -> None:
    rate = rate_of("x", "B/s", [3.0, 12.0, 6.0])
    assert (rate.value, rate.low, rate.high, rate.repeats) == (6.0, 3.0, 12.0, 3)


def test_a_short_disk_is_measured_on_less(tmp_path: Path) -> None:
    found = measure_store.measure_store(tmp_path, quick=True, free=measure_store.SPARE_DISK + 65 * MiB)
    for rate in found.rates:
        check(rate)
        assert 1e4 < rate.value < 1e11  # bytes per second, of a drive that others use as well
    assert found.figures["store_read"] != found.figures["store_write"]  # measured one by one
    assert 64 * MiB < found.written_bytes <= 5.5 * 64 * MiB
    assert any("64 MiB instead of 320 MiB" in note for note in found.notes)
    assert list(tmp_path.iterdir()) == []


def test_what_reads_take_from_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a step that takes as long as ever loses nothing, and one that takes twice as long while bytes are read loses
    half of its time to them. Time is the step's, and it waits for bytes: the drive may be as slow as it likes."""
    clock, beside = [0.0], [0.0]
    monkeypatch.setattr(measure_store, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    reading, under_way = measure_store._reading, [False]

    @contextmanager
    def marked(daemon: SwapDaemon, span: int) -> Iterator[None]:
        with reading(daemon, span):
            under_way[0] = True
            yield
            under_way[0] = False

    monkeypatch.setattr(measure_store, "_reading", marked)
    with measure_store.new_store([tmp_path], 64 * MiB) as (daemon, _):

        def step(factor: float) -> None:
            before = daemon.counters().read_bytes
            while under_way[0] and daemon.counters().read_bytes == before:
                time.sleep(0.001)
            seconds = 0.01 * (factor if under_way[0] else 1.0)
            clock[0] += seconds
            beside[0] += seconds * under_way[0]

        idle = measure_store.compute_lost(daemon, 64 * MiB, lambda: step(1.0), seconds=0.1)
        before, beside[0] = daemon.counters().read_bytes, 0.0
        half = measure_store.compute_lost(daemon, 64 * MiB, lambda: step(2.0), seconds=0.1)
        most = (daemon.counters().read_bytes - before) / beside[0]  # bytes per second, with those that came after the last step
    assert idle * most == pytest.approx(0.0, abs=1e-6)
    assert half > 0 and half * most >= 0.5 * (1 - 1e-6)
    assert list(tmp_path.iterdir()) == []


def test_no_room_and_no_directory(tmp_path: Path) -> None:
    with pytest.raises(OutOfSpaceError, match="too little to measure"):
        measure_store.measure_store(tmp_path, quick=True, free=measure_store.SPARE_DISK)
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(UsageError, match="cannot write to"):
        measure_store.measure_store(file, quick=True, free=1 << 40)
    assert file.read_text() == "mine"


def test_files_go_when_measuring_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_store, "QUICK", measure_store.QUICK._replace(repeats=0))  # nothing to take the median of
    with pytest.raises(statistics.StatisticsError):
        measure_store.measure_store(tmp_path, quick=True, free=measure_store.SPARE_DISK + 70 * MiB)
    assert list(tmp_path.iterdir()) == []


def test_adamw_is_measured_per_thread_count() -> None:
    found = measure_adamw(3, repeats=2)
    assert [rate.name for rate in found.rates] == ["AdamW, 1 thread", "AdamW, 2 threads"]
    assert found.figures["adamw"] == tuple((number, rate.value) for number, rate in enumerate(found.rates, start=1))
    for rate in found.rates:
        check(rate)
        assert 1e7 < rate.value < 1e12  # bytes, not gigabytes, on a machine that others use as well


def test_what_runs_at_once_is_counted_on_both_sides() -> None:
    turns: list[float] = []

    def step() -> None:
        turns.append(time.monotonic())
        time.sleep(0.02)

    shared = measure_shared(step, 4e9, seconds=0.2, note="sleeps")
    assert len(turns) >= 3 and all(0 < share <= 1.0 for share in shared.figures.values()) and len(shared.figures) == 2
    alone, beside, update = shared.rates
    for rate in shared.rates:
        check(rate)
    assert max(alone.high, beside.high) <= 4e9 / 0.02 and update.unit == "B/s"


def test_what_is_kept_of_a_pace() -> None:
    """Keeps rates beside others and alone."""
    assert measure_update._kept([1.0, 1.0], [2.0]) == 0.5
    assert measure_update._kept([3.0], [2.0, 2.0]) == 1.0


@pytest.mark.slow
def test_the_whole_bench_as_json(tmp_path: Path, small: Path) -> None:
    text = io.StringIO()
    report = run_bench(tmp_path, quick=True, json_output=True, device="cpu", out=Console(file=text, width=40))
    assert report is not None
    data = json.loads(text.getvalue())
    assert data == json.loads(json.dumps(bench_json(report)))
    assert data["schema_version"] == 2 and data["written_bytes"] <= 2_000_000_000
    names = [rate["name"] for rate in data["rates"]]
    for name in ("matmul bfloat16", "matmul float32", "training step", "store read while writing"):
        assert name in names
    for rate in report.rates:
        check(rate)
    rates = {rate.name: rate.value for rate in report.rates}
    found = report.profile
    assert {(rate.kind, rate.dtype) for rate in found.stage_rates} == {
        (kind, dtype) for kind in ("block", "head") for dtype in ("bfloat16", "float32")
    }
    block = next(rate for rate in found.stage_rates if (rate.kind, rate.dtype) == ("block", "bfloat16"))
    assert (block.forward, block.backward) == (rates["block 256 bfloat16, forward"], rates["block 256 bfloat16, backward"])
    assert block.given == rates["block 256 bfloat16, backward, outputs kept"]
    assert (found.host_copy, found.host_fresh) == (rates["copy"], rates["copy to new pages"])
    executed = 4 / (1 / block.forward + 3 / block.backward)
    assert found.matmul_flops == min(rates["matmul bfloat16"], executed)
    assert found.adamw[0] == (1, rates["AdamW, 1 thread"]) and found.adamw_bytes == rates["AdamW, 1 thread"]
    assert 0 < found.shared_compute <= 1 and 0 < found.shared_adamw <= 1
    assert 1e-13 < found.io_cpu < 1e-8  # seconds per byte
    assert found.store_write_mixed == rates["store write while reading"] and found.h2d == 0.0
    assert found.process_bytes > 50 * MiB and found.measured != "assumed" and data["digest"] == found.digest()
    assert list(tmp_path.iterdir()) == []
    assert [read_profile(path) for path in small.glob("fuyou/*.json")] == [found]


@pytest.fixture
def report() -> BenchReport:
    rates = (
        Rate(name="matmul bfloat16", unit="FLOP/s", value=0.861e12, low=0.8e12, high=0.9e12, repeats=3, note="2048 x 2048"),
        Rate(name="store read", unit="B/s", value=2.1e9, low=1.9e9, high=2.2e9, repeats=3, note="io_uring, O_DIRECT"),
        Rate(name="store write", unit="B/s", value=1.05e9, low=1.0e9, high=1.1e9, repeats=3, note="io_uring, O_DIRECT"),
    )
    return BenchReport(
        profile=profile.assumed_hardware(), rates=rates, notes=("bursts: [red]x[/red]",), quick=True, seconds=9.5,
        written_bytes=1_500_000_000,
    )  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_table_fits(report: BenchReport, width: int, encoding: str) -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding, write_through=True), width=width)
    show_bench(console, report)
    text = raw.getvalue().decode(encoding)
    assert max(map(len, text.splitlines())) <= width
    assert f"at most {gib(report.profile.pinnable)}: {report.profile.pinnable_why}" in " ".join(text.split())
    assert text.isascii() == (encoding == "ascii")
    rows = {name: line for name in ("matmul", "store read", "store write") for line in text.splitlines()
            if line.startswith(f"  {name} ") and "to" in line}  # fmt: skip
    assert rows["matmul"].split()[2:6] == ["0.861", "0.800", "to", "0.900"]
    assert all("io_uring" in rows[name] for name in ("store read", "store write"))  # no list of names below the table
    assert "io_uring, O_DIRECT" in text and "[red]x[/red]" in text and "1.5 GB written" in text


def test_sums_count_what_they_read_and_write() -> None:
    """A gradient of two bytes is read, a sum of four is read and written. Here the processor's own memory does it."""
    began = time.perf_counter()
    found = measure_sums(torch.device("cpu"), repeats=2, count=1 << 16)
    taken = time.perf_counter() - began
    (rate,) = found.rates
    check(rate)
    assert found.figures == {"device_memory_rate": rate.value} and rate.repeats == 2
    assert rate.value > 10 * (1 << 16) / taken
