"""scripts/prove_green.py: what failed is kept and told, what is done is not run again, and a busy machine is busy."""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path

import prove_green
import pytest
from proof.busy_machine import load

LUCK = """
from pathlib import Path
def test_fine(): pass
def test_of_luck():
    with open({ran!r}, "a") as file: file.write("x")
    assert len(Path({ran!r}).read_text()) != 2, "no luck"
"""


def test_what_failed_is_told_with_its_words(tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    file.write_text("def test_fine(): pass\ndef test_not_fine(): assert 1 == 2, 'no luck'\n")
    outcome = prove_green.run(str(file), tmp_path)
    (name,) = outcome["failures"]
    assert name.endswith("::test_not_fine") and "no luck" in outcome["said"]
    file.write_text("import os\ndef test_ends(): os._exit(3)\n")
    assert prove_green.run(str(file), tmp_path)["failures"] == [f"{file}: exit code 3"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("tests-")) == []


def test_a_test_of_luck_is_found_and_what_is_done_is_kept(tmp_path: Path) -> None:
    file, ran = tmp_path / "test_one.py", tmp_path / "ran"
    file.write_text(LUCK.format(ran=str(ran)))
    options = argparse.Namespace(side=1, deselect="")
    for runs, verdict, measured in ((1, "pass", "1 of 1"), (3, "FAIL", "2 of 3"), (3, "FAIL", "2 of 3")):
        session = prove_green.Session(options, tmp_path)
        session.repeat("runs", [str(file)], runs)
        (row,) = session.judged("runs", [str(file)], runs)
        assert (row.verdict, row.measured) == (verdict, measured)
    assert ran.read_text() == "xxx" and row.note.endswith("::test_of_luck")


def test_folders_of_more_risk_come_first() -> None:
    names = prove_green.folders([])
    assert names[0] == "tests/e2e" and "tests/unit" in names and len(names) == len(set(names))


def test_the_load_ends_with_its_context(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), load(tmp_path, cores=1, memory=1 << 20, file=1 << 20):
        while not (tmp_path / "load-1").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout
    assert left == ""
