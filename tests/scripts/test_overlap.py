"""The paced machine of the overlap proof: late transfers change no bit, and a run keeps to the rates that it is given."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import prove_overlap as proof
import pytest


def test_random_delays_change_no_bit() -> None:
    delayed = proof.Delayed(seed=1)
    assert all(delayed.run(number)["equal"] for number in range(2))


def test_a_paced_run_is_not_faster_than_its_bound(tmp_path: Path) -> None:
    """Shows that a busy processor can only make it slower. Without the pace, these steps take a fraction of the bound."""
    size = proof.SIZES[0]
    subject = proof.subject_of(size, blocks=2, micro_batches=2)
    run = proof.Paced(subject, proof.scaled(size, subject, 0.25), folder=tmp_path)
    steps = run.measure(2, home="ssd", states="ssd", clip=None, **proof.THREADS)
    assert sum(steps) / len(steps) >= 0.95 * run.bound() > 0.2
    assert run.peak <= run.plan.predicted.gpu_peak


@pytest.mark.slow
def test_a_ratio_is_measured_and_judged(tmp_path: Path) -> None:
    """Goes the whole way of the part at a rate that no processor keeps, so that it is quick and its verdict is no matter."""
    asked = Namespace(sizes=["8B"], blocks=2, slower=0.01, dram=0.0, steps=1)
    rows = proof.ratio_rows(asked, proof.Progress(tmp_path / "progress"))
    assert [row.what.partition(":")[0] for row in rows[::2]] == ["8B, clipping off", "8B, clipping on"]
    assert all(0 < row.values["bound"] <= row.values["steps"][0] for row in rows[::2])
