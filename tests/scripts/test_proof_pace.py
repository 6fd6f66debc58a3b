"""The machine's speed as the proofs ask for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from proof import pace
from proof.pace import Pace, moved


def test_a_machine_that_stays_as_it_is_has_not_moved() -> None:
    assert moved(100.0, 100.0, 100.0) == 1.0
    assert moved(100.0, 100.0, 60.0) == pytest.approx(0.8)
    assert moved(60.0, 100.0, 100.0) == pytest.approx(1.25)


def test_looks_tell_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_SECONDS", 0.05)
    with Pace(threads=1) as machine:
        assert machine.look() > 0
        process = machine._process
    assert process.returncode is not None
