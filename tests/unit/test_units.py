"""Tests sizes in steps: what comes and goes by a little does not change what follows from it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.core.units import GiB, MiB, brief, gb, gib, in_steps, parse_rate, parse_size


@given(st.integers(1, 1 << 44), st.floats(0, 1))
def test_never_more_and_little_less(whole: int, share: float) -> None:
    size = int(whole * share)
    rounded = in_steps(size, whole)
    assert 0 <= size - rounded < max(1, whole / 127)
    assert in_steps(rounded, whole) == rounded


def test_about_the_same_is_the_same() -> None:
    assert len({in_steps(20 * GiB + change * MiB, 24 * GiB) for change in range(1, 127)}) == 1


@given(st.integers(0, 999 * 10**12))
def test_a_size_is_read_as_it_is_written(size: int) -> None:
    for written in (gb(size), gib(size).replace(" GiB", "GiB")):
        assert abs(parse_size(written) - size) <= max(0.006 * size, MiB)
    assert abs(parse_size(gb(size)) - size) <= 0.006 * size
    assert abs(parse_rate(f"{gb(size)}/s", "B/s") - size) <= 0.006 * size


def test_a_short_time_has_digits_and_a_tiny_one_no_exponent() -> None:
    assert [brief(seconds) for seconds in (0, 9e-8, 2e-5, 0.0047, 4.04)] == ["0 ms", "< 0.01 ms", "0.02 ms", "4.7 ms", "4.0 s"]
