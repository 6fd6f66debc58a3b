"""Runs test files, properties or the native tests in a process of their own, and says what passed, what failed and how."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from fuyou_cli.core.units import MiB

from .verdicts import ROOT, code_files, extension

HANGS = 1500  # seconds after which a test is given up: on a machine that does other things as well
SANITIZERS = ("address", "thread")
_FIRST = ("e2e", "swap", "scripts", "quickstart", "bench", "cli", "engine", "hostile", "data")  # most threads and processes
_ENDS = (0, 1, 5)  # pytest's: all passed, some failed, none was chosen
_TAIL = 3000  # characters that are kept of a failure
# Modules by which a test runs or reads what it does not import.
_REACHES_FURTHER = {"subprocess", "multiprocessing", "runpy", "pty", "ast", "tokenize"}
_STATISTICS = re.compile(r"(\d+) passing(?: test cases| examples)?, (\d+) failing")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Holds the outcome of one process's tests. `failures`: by test, the end of what it said; also of a process that never
    reported."""

    tests: int
    skipped: int
    seconds: float
    failures: dict[str, str] = field(default_factory=dict)
    drawn: int = 0  # examples
    exhausted: bool = False  # there are no others

    def kept(self) -> dict[str, Any]:
        return asdict(self)


def files(chosen: Sequence[Path]) -> list[Path]:
    """Lists test files in the order of their risk, all or those chosen (files and folders)."""
    found = {
        path for place in chosen or [ROOT / "tests"] for path in ([place] if place.is_file() else place.rglob("test_*.py"))
    }
    return sorted(found, key=_risk)


def _risk(path: Path) -> tuple[int, str]:
    folder = name_of(path).split("/")[1]
    return (_FIRST.index(folder) if folder in _FIRST else len(_FIRST)), str(path)


def name_of(path: Path) -> str:
    return str(path.resolve().relative_to(ROOT))


def sources(path: Path) -> list[Path]:
    """Lists what a test file's outcome may depend on: the file, the `conftest.py` and `__init__.py` that pytest reads before
    it, every file of ours that any of these import, wherever in a file they do, what lies beside it for it to read, and the
    built extension. For a test that starts programs or reads the tree (`_REACHES_FURTHER`), all code besides."""
    tests, found = ROOT / "tests", set[Path]()
    folders = [folder for folder in path.parents if folder.is_relative_to(tests)]
    left, further = [path, *(folder / name for folder in folders for name in ("conftest.py", "__init__.py"))], False
    while left:
        file = left.pop()
        if file not in found and file.is_file():
            found.add(file)
            imported = _imported(file, file.read_bytes(), ROOT)
            left += imported.places
            further |= imported.further
    found.update(beside for beside in path.parent.rglob("*") if beside.is_file() and beside.suffix not in (".py", ".pyc"))
    found.update(code_files() if further else extension())
    return sorted(found)


@dataclass(frozen=True, slots=True)
class _Imported:
    places: tuple[Path, ...]  # where the modules that a file imports may lie
    further: bool


@cache
def _imported(file: Path, content: bytes, root: Path) -> _Imported:
    places, modules = list[Path](), set[str]()
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Import):
            level, names = 0, [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = f"{node.module}." if node.module else ""
            level, names = node.level, [base, *(f"{base}{alias.name}" for alias in node.names)]
        else:
            continue
        modules.update(name.partition(".")[0] for name in names if not level)
        roots = [file.parents[level - 1]] if level else [root, root / "tests", root / "scripts", file.parent]
        for parent, name in product(roots, names):
            place = parent.joinpath(*filter(None, name.split(".")))
            places += [place.with_suffix(".py"), place / "__init__.py"]
    return _Imported(tuple(places), not _REACHES_FURTHER.isdisjoint(modules))


def run_tests(
    tests: Sequence[str], *, work: Path, words: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Outcome:
    """Runs files or tests in a pytest process of their own, with folders of their own."""
    done, cases = _pytest(tests, work, words, environment or {})
    if cases is None:
        return _not_reported(tests, done)
    statistics = _STATISTICS.search(done.stdout)
    drawn = int(statistics.group(1)) if statistics else 0
    return replace(_outcome(cases), drawn=drawn, exhausted="Stopped because nothing left to do" in done.stdout)


def run_files(names: Sequence[str], *, work: Path, words: Sequence[str] = ()) -> dict[str, Outcome]:
    """Runs test files in one process. Returns the outcome of each. A process that never reports fails all of them."""
    done, cases = _pytest(names, work, ["--continue-on-collection-errors", *words], {})
    if cases is None:
        return dict.fromkeys(names, _not_reported(names, done))
    return {name: _outcome([case for case in cases if _is_of(case, name)]) for name in names}


def _pytest(
    tests: Sequence[str], work: Path, words: Sequence[str], environment: Mapping[str, str]
) -> tuple[subprocess.CompletedProcess[str], list[Element] | None]:
    """Returns the process, and the tests that its report names; None if it ended otherwise than pytest does, or wrote none."""
    with tempfile.TemporaryDirectory(prefix="tests-", dir=work) as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", f"--timeout={HANGS}", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", "-m", "", *options, f"--basetemp={folder}/tmp", *words, *tests]
        own = {"HYPOTHESIS_STORAGE_DIRECTORY": str(work / "hypothesis"), **environment}
        done = _said(command, {**os.environ, **own})
        try:
            cases = [*ElementTree.parse(report).iter("testcase")] if done.returncode in _ENDS else None
        except (OSError, ElementTree.ParseError):
            cases = None
        return done, cases


def _is_of(case: Element, name: str) -> bool:
    """Tells whether the test, or the error in importing its file, is of that file."""
    module = name.removesuffix(".py").replace("/", ".")
    return f"{case.get('classname')}.{case.get('name')}.".lstrip(".").startswith(f"{module}.")


def _outcome(cases: Sequence[Element]) -> Outcome:
    failures = {
        f"{case.get('classname')}::{case.get('name')}": (bad.text or bad.get("message") or "")[-_TAIL:]
        for case in cases
        for bad in (*case.findall("failure"), *case.findall("error"))
    }
    skipped = sum(case.find("skipped") is not None for case in cases)
    seconds = sum(float(case.get("time") or 0) for case in cases)
    return Outcome(tests=len(cases), skipped=skipped, seconds=round(seconds, 3), failures=failures)


def _not_reported(tests: Sequence[str], done: subprocess.CompletedProcess[str]) -> Outcome:
    said = f"{done.returncode}: {_end_of(done.stdout)}"
    return Outcome(tests=0, skipped=0, seconds=0.0, failures={f"pytest {' '.join(tests)}": said})


def _end_of(text: str) -> str:
    """Returns the end of a text; for a process that crashed, where it says how."""
    at = text.find("Fatal Python error")
    return text[-_TAIL:] if at < 0 else text[max(0, at - 200) : at + _TAIL]


def _said(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    )  # fmt: skip


def properties(chosen: Sequence[Path], work: Path) -> list[str]:
    """Lists every test that draws examples, by its pytest name."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--collect-only"]
    done = _said([*command, "-m", "hypothesis", *map(name_of, files(chosen))], os.environ)
    if done.returncode not in (0, 5):  # 5: none
        raise RuntimeError(f"the tests could not be collected (exit code {done.returncode}):\n{done.stdout[-_TAIL:]}")
    return [line for line in done.stdout.splitlines() if "::" in line]


def draw(test: str, examples: int, seed: int, work: Path) -> Outcome:
    """Runs one property with so many examples."""
    words = [f"--hypothesis-seed={seed}", "--hypothesis-show-statistics"]
    return run_tests([test], work=work, words=words, environment={"FUYOU_EXAMPLES": str(examples)})


def native_tests(sanitizer: str, work: Path) -> Outcome:
    """Runs all native tests, built with a sanitizer, side by side as `scripts/test` does. Builds them if there is no build."""
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
        cases = [*ElementTree.parse(report).iter("testcase")]
        failed = [case for case in cases if case.get("status") == "fail"]
        bad = {str(case.get("name")): (case.findtext("system-out") or "")[-_TAIL:] for case in failed}
        return replace(_outcome(cases), failures=bad)


def _path() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


# ---- a busy machine --------------------------------------------------------------------------------------------------


_COMPUTE = "while True:\n    sum(range(1 << 16))\n"
_MEMORY = """
import mmap, sys
while True:
    with mmap.mmap(-1, int(sys.argv[1])) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
"""
_DISK = """
import os, sys
data = os.urandom(1 << 20)
while True:
    with open(sys.argv[1], "wb", buffering=0) as file:
        for _ in range(int(sys.argv[2]) >> 20):
            file.write(data)
        os.fsync(file.fileno())
"""
_UNDER_LOAD = (
    "import os, sys, threading\nthreading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()\n"
)


@contextmanager
def load(folder: Path, *, cores: int, memory: int = 512 * MiB, file: int = 64 * MiB) -> Iterator[None]:
    """Runs, while inside, two computing processes per core, one that maps, touches and gives back `memory` bytes without end,
    and two that write and flush a file of `file` bytes in `folder`. They end with this process, however it ends."""
    files = [folder / f"load-{number}" for number in range(2)]
    programs = [(_COMPUTE, [])] * 2 * cores + [(_MEMORY, [str(memory)])] + [(_DISK, [str(path), str(file)]) for path in files]
    started = []
    try:
        for program, words in programs:
            command = [sys.executable, "-c", _UNDER_LOAD + program, *words]
            started.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
        for path in files:
            path.unlink(missing_ok=True)
