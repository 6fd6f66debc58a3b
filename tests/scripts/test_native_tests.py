"""scripts/test: a native test that could not run here is named, as ctest counts it among those that passed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "test"
RECORDED = """2/3 Test #2: test_ring ........................***Skipped   0.00 sec
3/3 Test #3: test_levels ......................***Skipped   0.00 sec

100% tests passed, 0 tests failed out of 3

Total Test time (real) =   0.02 sec

The following tests did not run:
\t  2 - test_ring (Skipped)
\t  3 - test_levels (Skipped)
"""
TESTS = """add_test(good "/bin/true")
add_test(test_ring "/bin/sh" "-c" "exit 77")
set_tests_properties(test_ring PROPERTIES SKIP_RETURN_CODE 77)
"""


def _summary(log: Path) -> str:
    """The function `summary` of scripts/test, which itself would run everything."""
    function = SCRIPT.read_text().partition("\nsummary() {")[2].partition("\n}\n")[0]
    assert function
    program = f"set -euo pipefail; summary() {{{function}\n}}\nsummary {log}"
    return subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout


def test_those_that_did_not_run_are_named(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(RECORDED)
    assert _summary(log) == (
        "100% tests passed, 0 tests failed out of 3; did not run here: test_ring (Skipped), test_levels (Skipped)\n"
    )
    log.write_text(RECORDED.partition("\nThe following")[0])
    assert _summary(log) == "100% tests passed, 0 tests failed out of 3\n"


@pytest.mark.skipif(shutil.which("ctest") is None, reason="ctest is not installed")
def test_the_installed_ctest_says_it_that_way(tmp_path: Path) -> None:
    (tmp_path / "CTestTestfile.cmake").write_text(TESTS)
    log = tmp_path / "log"
    with log.open("wb") as file:
        subprocess.run(["ctest", "--test-dir", str(tmp_path), "--output-on-failure"], stdout=file, check=True)
    summary = _summary(log)  # since 4.1 ctest leaves out that none failed
    assert summary.startswith("100% tests passed") and summary.endswith("out of 2; did not run here: test_ring (Skipped)\n")
