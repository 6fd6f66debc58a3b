"""One pytest process, or one of the native tests: what passed, what failed and how it said so."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .report import ROOT

HANGS = 1500  # seconds after which a test is given up: on a machine that does other things as well
SANITIZERS = ("address", "thread")
_FIRST = ("e2e", "swap", "scripts", "quickstart", "bench", "cli", "engine", "hostile", "data")  # most threads and processes
_TAIL = 3000  # characters that are kept of a failure
_STATISTICS = re.compile(r"(\d+) passing(?: test cases| examples)?, (\d+) failing")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of the tests of one process. `failures`: by test, the end of what it said; also of a process that never reported."""

    tests: int
    skipped: int
    seconds: float
    failures: dict[str, str] = field(default_factory=dict)
    drawn: int = 0  # examples
    exhausted: bool = False  # there are no others

    def kept(self) -> dict[str, Any]:
        return asdict(self)


def files(chosen: Sequence[Path]) -> list[Path]:
    """Test files in the order of their risk, all or those chosen (files and folders)."""
    found = {
        path for place in chosen or [ROOT / "tests"] for path in ([place] if place.is_file() else place.rglob("test_*.py"))
    }
    return sorted(found, key=_risk)


def _risk(path: Path) -> tuple[int, str]:
    folder = name_of(path).split("/")[1]
    return (_FIRST.index(folder) if folder in _FIRST else len(_FIRST)), str(path)


def name_of(path: Path) -> str:
    return str(path.resolve().relative_to(ROOT))


def run_tests(
    tests: Sequence[str], *, work: Path, words: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Outcome:
    """These files or tests in a pytest process of their own, with folders of their own."""
    with tempfile.TemporaryDirectory(prefix="tests-", dir=work) as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", f"--timeout={HANGS}", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *options, f"--basetemp={folder}/tmp", *words, *tests]
        own = {"HYPOTHESIS_STORAGE_DIRECTORY": str(work / "hypothesis"), **(environment or {})}
        done = _said(command, {**os.environ, **own})
        statistics = _STATISTICS.search(done.stdout)
        found = _read(report)
        if found is None or done.returncode not in (0, 1):
            what = f"pytest {' '.join(tests)}"
            return Outcome(tests=0, skipped=0, seconds=0.0, failures={what: f"{done.returncode}: {_end_of(done.stdout)}"})
        drawn = int(statistics.group(1)) if statistics else 0
        return Outcome(**{**found, "drawn": drawn, "exhausted": "Stopped because nothing left to do" in done.stdout})


def _end_of(text: str) -> str:
    """The end; of a process that crashed where it says how."""
    at = text.find("Fatal Python error")
    return text[-_TAIL:] if at < 0 else text[max(0, at - 200) : at + _TAIL]


def _said(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    )  # fmt: skip


def _read(report: Path) -> dict[str, Any] | None:
    """What pytest's report says; None where it wrote none."""
    try:
        suite = ElementTree.parse(report).getroot()[0]
    except (OSError, ElementTree.ParseError):
        return None
    failures = {}
    for case in suite.iter("testcase"):
        for bad in (*case.findall("failure"), *case.findall("error")):
            failures[f"{case.get('classname')}::{case.get('name')}"] = (bad.text or bad.get("message") or "")[-_TAIL:]
    return {
        "tests": int(suite.get("tests", 0)),
        "skipped": int(suite.get("skipped", 0)),
        "seconds": float(suite.get("time", 0)),
        "failures": failures,
    }


def properties(chosen: Sequence[Path], work: Path) -> list[str]:
    """Every test that draws examples, by its pytest name."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--collect-only"]
    done = _said([*command, "-m", "hypothesis", *map(name_of, files(chosen))], os.environ)
    if done.returncode not in (0, 5):  # 5: none
        raise RuntimeError(f"the tests could not be collected (exit code {done.returncode}):\n{done.stdout[-_TAIL:]}")
    return [line for line in done.stdout.splitlines() if "::" in line]


def draw(test: str, examples: int, seed: int, work: Path) -> Outcome:
    """One property with so many examples."""
    words = [f"--hypothesis-seed={seed}", "--hypothesis-show-statistics"]
    return run_tests([test], work=work, words=words, environment={"FUYOU_EXAMPLES": str(examples)})


def native_tests(sanitizer: str, work: Path) -> Outcome:
    """All of them, built with a sanitizer, side by side as `scripts/test` runs them. The build is made where there is none."""
    build = ROOT / "build" / f"tests-{sanitizer}"
    if not (build / "CTestTestfile.cmake").is_file():
        raise RuntimeError(f"{build.relative_to(ROOT)} is not built: scripts/test builds it")
    plain = ["setarch", os.uname().machine, "-R"]  # ThreadSanitizer wants addresses that are not randomised
    if shutil.which("setarch") is None or subprocess.run([*plain, "true"], capture_output=True).returncode:
        plain = []
    with tempfile.TemporaryDirectory(prefix="tests-", dir=work) as folder:
        report = Path(folder) / "report.xml"
        ctest = ["ctest", "--test-dir", str(build), "-j", "2", "--output-on-failure", "--timeout", str(HANGS)]
        done = _said([*plain, *ctest, "--output-junit", str(report)], {**os.environ, "PATH": _path()})
        if not report.is_file():
            return Outcome(tests=0, skipped=0, seconds=0.0, failures={"ctest": done.stdout[-_TAIL:]})
        suite = ElementTree.parse(report).getroot()
        cases = [*suite.iter("testcase")]
        bad = {
            str(case.get("name")): (case.findtext("system-out") or "")[-_TAIL:]
            for case in cases
            if case.get("status") == "fail"
        }
        seconds = sum(float(case.get("time") or 0) for case in cases)
        return Outcome(tests=len(cases), skipped=int(suite.get("skipped", 0)), seconds=seconds, failures=bad)


def _path() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
