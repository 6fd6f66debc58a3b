"""scripts/prove_green.py: what failed is kept and told, what passed is not run again, and a busy machine is busy."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from proof import green
from proof.load import load

FOUND = """
from hypothesis import given, strategies as st
def test_fine(tmp_path): pass
def test_not_fine(): assert 1 == 2, "no luck"
@given(st.booleans())
def test_of_few(value): pass
"""


def test_what_failed_is_told_with_its_words(tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    file.write_text(FOUND)
    outcome = green.run_tests([str(file)], work=tmp_path)
    assert (outcome.tests, outcome.skipped, len(outcome.failures)) == (3, 0, 1)
    ((name, said),) = outcome.failures.items()
    assert name.endswith("::test_not_fine") and "no luck" in said
    drawn = green.draw(f"{file}::test_of_few", 50, 1, tmp_path)
    assert (drawn.failures, drawn.drawn, drawn.exhausted) == ({}, 2, True)
    file.write_text("import os\ndef test_ends(): os._exit(3)\n")
    assert "3: " in next(iter(green.run_tests([str(file)], work=tmp_path).failures.values()))
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("tests-")) == []


def test_files_of_more_risk_come_first() -> None:
    found = [green.name_of(path) for path in green.files([])]
    assert found[0].startswith("tests/e2e/") and "tests/unit/test_units.py" in found and len(found) == len(set(found))


def test_the_load_ends_with_its_context(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), load(tmp_path, cores=1, memory=1 << 20, file=1 << 20):
        while not (tmp_path / "load-1").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout
    assert left == ""
