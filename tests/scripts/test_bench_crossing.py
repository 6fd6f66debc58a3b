"""scripts/bench_crossing.py: what it says of made-up figures, and a short run: the device is never faster than it is told
to be, and no copy of a block is the launching thread's. How much slower it is depends on the machine: the script says it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import bench_crossing
from proof.verdicts import FAIL, PASS, REPORTED


@pytest.mark.parametrize(("over", "copied", "verdicts"), [(1.04, 9e6, [PASS, PASS]), (1.06, 11e6, [FAIL, FAIL])])
def test_what_is_asked_is_judged(over: float, copied: float, verdicts: list[str]) -> None:
    ideal = bench_crossing.ASKED * bench_crossing.BACKWARD  # longer than its copies
    found = bench_crossing.Found(micro_batches=bench_crossing.ASKED, period=over * ideal, stays=True, host=[int(copied), 1])
    assert found.over == pytest.approx(over)
    assert [row.verdict for row in bench_crossing.rows_of(found, 10e9)] == verdicts


@pytest.mark.parametrize("stays", [True, False])
def test_a_short_run(stays: bool, tmp_path: Path) -> None:
    found = bench_crossing.measured(2, 1.0, tmp_path, stays=stays)
    assert found.down > found.compute  # of two micro-batches it is the gradients that are waited for
    assert found.period > 0.95 * found.compute
    assert found.host == []
    assert [row.verdict for row in bench_crossing.rows_of(found, 10e9)] == [REPORTED, PASS]
