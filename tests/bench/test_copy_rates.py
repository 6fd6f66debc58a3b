"""Tests copies to a device and back at once: the arithmetic on made-up ends, the measuring on an emulated device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.engine.devices import open_device
from fuyou_cli.machine.measure.copies import LEAST, at_once, measure_copies

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
