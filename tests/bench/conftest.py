"""Makes a little of everything, so that measuring for real is quick."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fuyou_cli.core.units import MiB
from fuyou_cli.machine.measure import compute, store_rates, whole

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Measures little, on one thread, and keeps it in the folder that is given."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(store_rates, "QUICK_SPAN", 64 * MiB)
    monkeypatch.setattr(compute, "WIDTHS", (256,))
    monkeypatch.setattr(compute, "QUICK_PAIR", 0.05)
    monkeypatch.setattr(compute, "QUICK_SECONDS", 100.0)  # nothing is left out, however busy the machine
    monkeypatch.setattr(compute, "QUICK_RECIPE_PAIR", 0.5)
    monkeypatch.setattr(compute, "SECONDS", {"block": 0.5, "head": 0.5})
    monkeypatch.setattr(whole, "MATMUL_SECONDS", 0.01)
    monkeypatch.setattr(whole, "REPEAT_SECONDS", 0.1)
    monkeypatch.setattr(whole, "SHARED_WIDTH", 256)
    monkeypatch.setattr(whole, "SHARED_QUICK_SECONDS", 0.2)
    monkeypatch.setattr(store_rates, "WINDOW", 16 * MiB)
    monkeypatch.setattr(store_rates, "MOST_BYTES", 10 * 16 * MiB)
    kept = tmp_path.parent / f"{tmp_path.name}-cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))
    yield kept
    torch.set_num_threads(threads)


@pytest.fixture
def fuyou_there(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs fuyou(*arguments) as a process of its own in tmp_path, without a terminal."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fuyou_cli", *map(str, arguments)]
        return subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=120, check=False,
        )  # fmt: skip

    return run
