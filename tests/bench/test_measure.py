"""Tests that `fuyou bench` measures for real, on little data, and leaves nothing behind; and what rates are made of."""

from __future__ import annotations

import io
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fuyou_cli.cli.bench import bench_json, run_bench, show_bench
from fuyou_cli.core.errors import OutOfSpaceError, UsageError
from fuyou_cli.core.units import MiB, gib
from fuyou_cli.engine.devices import open_device
from fuyou_cli.machine import profile
from fuyou_cli.machine.measure import memory_rates
from fuyou_cli.machine.measure import memory_rates as measure_update
from fuyou_cli.machine.measure import store_rates as measure_store
from fuyou_cli.machine.measure.memory_rates import (
    LEAST,
    at_once,
    judged,
    measure_adamw,
    measure_copies,
    measure_dram,
    measure_shared,
    measure_sums,
)
from fuyou_cli.machine.measure.store_rates import REQUEST, Course, Look, RequestStream, new_store, run_streams
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


# ---- rates ---------------------------------------------------------------------------------------------------------------


# ---- copy rates ------------------------------------------------------------------------------------------------------
# Tests copies to a device and back at once: the arithmetic on made-up ends, the measuring on an emulated device.


RATES = st.floats(1.0, 100.0)
SHARES = st.floats(0.2, 1.0)


@given(st.tuples(RATES, RATES), st.tuples(SHARES, SHARES))
def test_the_rates_of_a_bus_are_found_again(alone: tuple[float, float], shares: tuple[float, float]) -> None:
    """Both copies move at their share until the first is done, the other then at its rate alone."""
    size = 1000
    mixed = (alone[0] * shares[0], alone[1] * shares[1])
    first = min(size / rate for rate in mixed)
    ends = [first + max(0.0, size - rate * first) / most for rate, most in zip(mixed, alone, strict=True)]
    assert at_once(size, ends, alone) == pytest.approx(mixed, rel=1e-6)


@given(st.tuples(RATES, RATES), st.tuples(st.floats(0.1, 1e4), st.floats(0.1, 1e4)))
def test_no_rate_is_above_the_one_alone_or_none(alone: tuple[float, float], ends: tuple[float, float]) -> None:
    for rate, most in zip(at_once(1000, ends, alone), alone, strict=True):
        assert LEAST * most <= rate <= most


def test_an_emulated_device_is_measured() -> None:
    """Copies on one thread each way: at once none is faster than alone."""
    device = open_device("emulated")
    try:
        found = measure_copies(device, repeats=3, size=32 << 20)
    finally:
        device.close()
    assert [rate.unit for rate in found.rates] == ["B/s"] * 4 and all(rate.repeats == 3 for rate in found.rates)
    up, down, up_mixed, down_mixed = (found.figures[key] for key in ("h2d", "d2h", "h2d_mixed", "d2h_mixed"))
    assert min(up, down) > 1e7
    assert up_mixed <= up and down_mixed <= down


# ---- dram ------------------------------------------------------------------------------------------------------------
# Tests what the memory gives to all at once: the verdict on made-up rates, the measuring on an emulated device.


ALONE = {"AdamW": [39.0, 40.0, 44.0], "reads": [7.0, 7.0, 7.0], "copies both ways": [21.0, 20.0, 21.0]}  # 68 in all


@pytest.mark.parametrize(
    ("at_once", "best", "limit"),
    [([50.0, 52.0, 51.0], 45.0, 52.0), ([50.0, 52.0, 51.0], 55.0, 55.0), ([50.0, 66.0, 51.0], 45.0, 0.0)],
    ids=["slower at once", "AdamW got more alone", "one turn as fast as alone"],
)
def test_the_memory_is_a_limit_only_where_every_turn_shows_it(at_once: list[float], best: float, limit: float) -> None:
    found = judged(ALONE, at_once, best=best)
    assert found.figures == {"dram": limit} and bool(found.notes) is not bool(limit)
    assert found.rates[0].note == "alone: AdamW 40 B/s, reads 7 B/s, copies both ways 21 B/s"


def test_adamw_reads_and_copies_are_measured_at_once(tmp_path: Path) -> None:
    device = open_device("emulated")
    try:
        found = measure_dram(tmp_path, threads=1, best=1e12, device=device, seconds=0.01, turns=1)
    finally:
        device.close()
    (rate,) = found.rates
    assert rate.value > 1e6 and rate.repeats == 1
    assert [name in rate.note for name in ("AdamW", "reads", "copies both ways")] == [True] * 3
    assert found.figures["dram"] in (0.0, 1e12) and not list(tmp_path.iterdir())


def test_an_interrupted_measurement_ends_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while the main thread waits for the others to move bytes, in memory that is freed next."""
    moved, before = threading.Event(), set(threading.enumerate())

    def move() -> int:
        moved.set()
        return 1

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            moved.wait()
            raise KeyboardInterrupt

    monkeypatch.setattr(memory_rates, "threading", SimpleNamespace(Event=Interrupted))
    with pytest.raises(KeyboardInterrupt):
        memory_rates.together({"moves": [move]}, best=1.0, seconds=0.01, turns=1)
    assert set(threading.enumerate()) <= before


# ---- streams ---------------------------------------------------------------------------------------------------------
# Tests what a stream's looks at the daemon's counters say of a drive, with made-up looks and real ones.


OFTEN = 0.005


def _held(rate: float, *, seconds: float, saved: float, lump: float, late: float = 0.0) -> Course:
    """Stands for a drive that gives `saved` bytes at once, then `lump` bytes each time it has come to own them."""

    def given(now: float) -> int:
        return int(saved + (now * rate + late) // lump * lump) if now else 0

    looks = [Look(seconds=now * OFTEN, read_bytes=given(now * OFTEN), written_bytes=0) for now in range(int(seconds / OFTEN))]
    return Course(looks=tuple(looks), finished=0)


@pytest.mark.parametrize("rate", [3e8, 6e8, 9e8])
@pytest.mark.parametrize("late", [0.0, 0.4, 0.9])
def test_what_was_saved_up_and_lumps_are_not_taken_for_the_rate(rate: float, late: float) -> None:
    lump = 0.15 * rate
    course = _held(rate, seconds=1.0, saved=0.1 * rate, lump=lump, late=late * lump)
    assert course.settled.reading == pytest.approx(rate, rel=0.05)
    assert course.settled.writing == 0.0


def test_a_steady_drive_has_one_rate() -> None:
    course = Course(
        looks=tuple(Look(seconds=now / 10, read_bytes=now * 70, written_bytes=now * 30) for now in range(11)), finished=0
    )
    for pace in (course.whole, course.settled, *course.windows):
        assert (pace.reading, pace.writing) == (pytest.approx(700), pytest.approx(300))
    assert len(course.windows) == 3


def test_two_looks_are_enough() -> None:
    looks = (Look(seconds=0.0, read_bytes=0, written_bytes=0), Look(seconds=0.5, read_bytes=50, written_bytes=5))
    course = Course(looks=looks, finished=50)
    assert course.settled == course.whole and course.windows == [course.whole]


def test_a_stream_goes_over_its_part_again_until_its_total(tmp_path: Path) -> None:
    with new_store([tmp_path], 4 * REQUEST) as (daemon, _):
        course = run_streams(daemon, [RequestStream(kind="write", first=0, size=2 * REQUEST, slot=0, total=7 * REQUEST)], 60.0)
        assert course.finished == 7 * REQUEST == daemon.counters().written_bytes
        assert course.looks[0] == Look(seconds=0.0, read_bytes=0, written_bytes=0)
        assert course.looks[-1].written_bytes == 7 * REQUEST
        assert [look.seconds for look in course.looks] == sorted({look.seconds for look in course.looks})


def test_time_ends_a_stream(tmp_path: Path) -> None:
    with new_store([tmp_path], 4 * REQUEST) as (daemon, _):
        course = run_streams(daemon, [RequestStream(kind="read", first=0, size=2 * REQUEST, slot=0, total=1 << 50)], 0.05)
        assert course.looks[-1].seconds >= 0.05 and 0 < course.finished < 1 << 50
        assert course.settled.reading > 0
