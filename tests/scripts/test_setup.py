"""scripts/setup.sh with an interpreter that only writes down what it is asked: which torch it fetches and why, what it does
with a .venv that somebody else made. scripts/test names native tests that could not run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).resolve().parents[2] / "scripts" / "setup.sh"
# `-m pip install` succeeds where $HAS matches its arguments; `-` is the question for torch's version.
PYTHON = """#!/bin/bash
home=$(dirname "$0")
case "$1 $2" in
"-m pip") [ "$3" = --version ] && { [ -e "$home/pip" ]; exit; }
    echo "${@:3}" >>"$home/asked"; [[ "$*" == $HAS ]] || exit 1
    v="${*: -1}"; echo "${v#torch==}" >"$home/torch" ;;
"-m ensurepip") [ -n "$ENSUREPIP" ] && touch "$home/pip" ;;
"-m venv") echo venv >>"$home/asked" ;;
"- ") cat "$home/torch" 2>/dev/null ;;
"-W ignore" | -c*) grep -q cpu "$home/torch" && echo CPU || echo CUDA 13 ;;
*) echo Python 3.12 ;;
esac
"""


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    (tmp_path / "build").mkdir()
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path / ".venv"


def _bash(venv: Path, call: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = f'source {SETUP}; root={venv.parent} venv={venv}; gpu_seen() {{ [ -n "$GPU" ]; }}; {call}'
    return subprocess.run(
        ["bash", "-c", program], env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True, text=True, check=False
    )


def _asked(venv: Path) -> list[str]:
    asked = venv / "bin" / "asked"
    return asked.read_text().splitlines() if asked.exists() else []


@pytest.mark.parametrize(
    ("environment", "fetches", "said"),
    [
        ({"HAS": "*+cpu*"}, 1, "+cpu, CPU build: no GPU was seen"),
        ({"HAS": "*whl/cpu*"}, 2, "+cpu, CPU build: no GPU was seen"),
        ({"HAS": "*torch==2.13.0"}, 3, "CUDA 13 build: no GPU was seen, but no CPU build could be had"),
        ({"HAS": "*torch==2.13.0", "GPU": "1"}, 1, "CUDA 13 build: pip's default build, as there is a GPU"),
    ],
)
def test_which_torch_and_why(venv: Path, environment: dict[str, str], fetches: int, said: str) -> None:
    done = _bash(venv, "choose_torch", **environment)
    assert done.returncode == 0, done.stderr
    assert len(_asked(venv)) == fetches
    assert said in done.stderr.splitlines()[-1]
    version = (venv / "bin" / "torch").read_text().strip()
    assert (venv / "constraints.txt").read_text() == f"torch=={version}\n"


def test_an_installed_torch_is_kept(venv: Path) -> None:
    (venv / "bin" / "torch").write_text("2.11.0+cpu\n")
    done = _bash(venv, "choose_torch")
    assert done.returncode == 0 and _asked(venv) == []
    assert "torch: 2.11.0+cpu, CPU build: already installed" in done.stderr


def test_no_torch_at_all_ends_it(venv: Path) -> None:
    done = _bash(venv, "choose_torch", HAS="nothing")
    assert done.returncode == 1 and "pip failed" in done.stderr
    assert not (venv / "constraints.txt").exists()


def test_somebodys_environment_without_pip_is_not_cleared(venv: Path) -> None:
    work = venv / "lib" / "precious"
    work.mkdir(parents=True)
    done = _bash(venv, f"ready_venv {venv}/bin/python")
    assert done.returncode == 1
    assert "uv pip install pip" in done.stderr
    assert _asked(venv) == [] and work.is_dir()
    mended = _bash(venv, f"ready_venv {venv}/bin/python", ENSUREPIP="1")
    assert mended.returncode == 0 and _asked(venv) == []


@pytest.mark.parametrize("mark", [".venv/made-by-fuyou", "build/venv-unfinished"])
def test_an_own_environment_is_made_anew(venv: Path, mark: str) -> None:
    (venv.parent / mark).touch()
    done = _bash(venv, f"ready_venv {venv}/bin/python")
    assert done.returncode == 0, done.stderr
    assert _asked(venv) == ["venv"]
    assert (venv / "made-by-fuyou").exists() and not (venv.parent / "build" / "venv-unfinished").exists()


def _set_up(venv: Path, extra: str = "", **environment: str) -> list[str]:
    """Returns what pip was asked for by `setup EXTRA`."""
    before = len(_asked(venv))
    call = f"find_python() {{ echo {venv}/bin/python; }}; missing_packages() {{ :; }}; setup {extra}"
    done = _bash(venv, call, HAS="*", **environment)
    assert done.returncode == 0, done.stderr
    return _asked(venv)[before:]


@pytest.fixture
def checkout(venv: Path) -> Path:
    (venv.parent / "native").mkdir()
    (venv.parent / "pyproject.toml").touch()
    (venv / "bin" / "pip").touch()
    (venv / "bin" / "torch").write_text("2.11.0+cpu\n")
    return venv


def test_a_stamp_is_true_for_the_last_installation_only(checkout: Path) -> None:
    assert len(_set_up(checkout, "test")) == 1
    assert _set_up(checkout, "test") == []
    # One environment has one extension: this one replaces the one that `test` was stamped with.
    assert len(_set_up(checkout, FUYOU_WITHOUT_URING="1")) == 1
    again = _set_up(checkout, "test")
    assert len(again) == 1 and "FUYOU_WITHOUT_URING=OFF" in again[0]


def test_what_was_installed_with_an_extra_serves_without_it(checkout: Path) -> None:
    assert len(_set_up(checkout)) == 1
    assert len(_set_up(checkout, "test")) == 1
    assert _set_up(checkout) == []
    assert _set_up(checkout, "test") == []


def test_of_two_stamps_neither_is_believed(checkout: Path) -> None:
    _set_up(checkout)
    shutil.copy(checkout / "installed-run", checkout / "installed-test")
    assert len(_set_up(checkout)) == 1


def test_an_installation_that_failed_leaves_no_stamp(checkout: Path) -> None:
    _set_up(checkout)
    call = f"find_python() {{ echo {checkout}/bin/python; }}; missing_packages() {{ :; }}; setup"
    assert _bash(checkout, call, HAS="nothing", FUYOU_WITHOUT_URING="1").returncode == 1
    assert len(_set_up(checkout)) == 1


# ---- scripts/test --------------------------------------------------------------------------------------------------------


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
