"""The machine's speed as the proofs ask for it."""

from __future__ import annotations

import time

import pytest
from proof import watch
from proof.both_sides import _counted
from proof.watch import Pace


@pytest.mark.slow
def test_the_speed_is_that_of_the_looks_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_PAUSE", 0.01)
    with Pace() as machine:
        now = time.monotonic()
        while len(machine._looks) < 5:
            time.sleep(0.01)
        assert machine.speed(0.0, now + 60) > 0
        assert machine.speed(0.0, 1e-9) == 0.0
        machine._looks[:] = [(1.0, 0.5), (2.0, 0.25), (3.0, 0.75), (4.0, 9.0)]
        assert machine.speed(2.0, 3.0) == pytest.approx(2.0)
        process = machine._process
    assert process.returncode is not None and not machine._hearing.is_alive()


def test_steps_that_do_not_count_are_left_out() -> None:
    ends = [10.0, 20.0, 30.0, 40.0]
    assert _counted(ends, 2) == (20.0, 40.0) and _counted(ends, 0) == (0.0, 40.0)
