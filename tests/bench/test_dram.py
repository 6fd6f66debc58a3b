"""Tests what the memory gives to all at once: the verdict on made-up rates, the measuring on an emulated device."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from fuyou_cli.engine.devices import open_device
from fuyou_cli.machine.measure import dram
from fuyou_cli.machine.measure.dram import judged, measure_dram

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

    monkeypatch.setattr(dram, "threading", SimpleNamespace(Event=Interrupted))
    with pytest.raises(KeyboardInterrupt):
        dram.together({"moves": [move]}, best=1.0, seconds=0.01, turns=1)
    assert set(threading.enumerate()) <= before
