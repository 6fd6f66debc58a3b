"""The losses of committed steps, in a file that may have been lost or cut."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fuyou_cli.training.state.store_folders import LOSSES, read_losses, write_losses


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_losses_that_were_lost_are_not_zero(kept: int, tmp_path: Path) -> None:
    write_losses(tmp_path, [4.0, 3.0, 2.0])
    path = tmp_path / LOSSES
    path.write_bytes(path.read_bytes()[: 8 * kept + 5 * (kept < 3)])  # cut inside a number
    write_losses(tmp_path, [1.0, 0.5], first=3)
    found, note = read_losses(tmp_path, 5)
    assert found[:kept] == [4.0, 3.0, 2.0][:kept] and found[3:] == [1.0, 0.5] and note == ""
    assert all(math.isnan(loss) for loss in found[kept:3])
    assert path.stat().st_size == 40


def test_losses_behind_the_last_committed_step_are_written_over(tmp_path: Path) -> None:
    write_losses(tmp_path, [4.0, 3.0, 2.0])
    write_losses(tmp_path, [7.0], first=1)
    assert read_losses(tmp_path, 2) == ([4.0, 7.0], "")
