"""Tests what a stream's looks at the daemon's counters say of a drive, with made-up looks and real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuyou_cli.machine.measure.store_rates import new_store
from fuyou_cli.machine.measure.streams import REQUEST, Course, Look, Stream, run_streams

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
        course = run_streams(daemon, [Stream(kind="write", first=0, size=2 * REQUEST, slot=0, total=7 * REQUEST)], 60.0)
        assert course.finished == 7 * REQUEST == daemon.counters().written_bytes
        assert course.looks[0] == Look(seconds=0.0, read_bytes=0, written_bytes=0)
        assert course.looks[-1].written_bytes == 7 * REQUEST
        assert [look.seconds for look in course.looks] == sorted({look.seconds for look in course.looks})


def test_time_ends_a_stream(tmp_path: Path) -> None:
    with new_store([tmp_path], 4 * REQUEST) as (daemon, _):
        course = run_streams(daemon, [Stream(kind="read", first=0, size=2 * REQUEST, slot=0, total=1 << 50)], 0.05)
        assert course.looks[-1].seconds >= 0.05 and 0 < course.finished < 1 << 50
        assert course.settled.reading > 0
