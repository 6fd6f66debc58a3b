"""Rates from what was timed: of copies both ways, of all that moves bytes at once, of streams of requests."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.engine.devices import open_device
from fuyou_cli.machine.measure import memory_rates
from fuyou_cli.machine.measure.memory_rates import LEAST, at_once, judged, measure_copies, measure_dram
from fuyou_cli.machine.measure.store_rates import REQUEST, Course, Look, RequestStream, new_store, run_streams

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
