#!/usr/bin/env python3
"""Shows that green means green: no test fails by luck, by its neighbours or on a busy machine.

    python scripts/prove_green.py --work DIR
    hours on two cores; the same command continues at any point; to try it: tests/unit --runs 2 --loaded 1 --examples 200

Every folder of tests, slow ones included, runs `--runs` times in a process of its own, with another one beside it (`--side`).
Then it runs `--loaded` times while more processes than cores compute, touch memory, and write and flush files. Every property
draws `--examples` examples, with another seed for each property. The native tests count as two folders, one per sanitizer, if
`scripts/test` has built them. What is done is kept in DIR until any code changes. Folders and files may be named; `--only`
picks parts. All of it takes a little more than 13 times the processor time of `scripts/test -m ''`, and the examples.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof.busy_machine import load
from proof.verdicts import ROOT, Progress, Row, code, conclude, digest, holds, missing, plain_parser, say

from fuyou_cli.machine.profile import core_count

PARTS = ("runs", "loaded", "examples")
HANGS = 1500  # seconds after which a test is given up: on a machine that does other things as well
SANITIZERS = {"native (address sanitizer)": "address", "native (thread sanitizer)": "thread"}
_FIRST = ("e2e", "swap", "scripts", "quickstart", "bench", "cli", "engine")  # most threads and processes
_ENDS = (0, 5)  # pytest's: all passed, none was chosen
_TAIL = 3000  # characters that are kept of a failure
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", f"--timeout={HANGS}")


def arguments() -> argparse.Namespace:
    made = plain_parser(__doc__)
    made.add_argument("tests", nargs="*", type=Path, help="folders or files of tests (default: all, and the native ones)")
    made.add_argument("--runs", type=int, default=10, help="of every folder")
    made.add_argument("--loaded", type=int, default=3, help="of every folder on a busy machine")
    made.add_argument("--examples", type=int, default=20_000, help="of every property")
    made.add_argument("--side", type=int, default=2, help="processes at once")
    made.add_argument("--only", choices=PARTS, action="append", help="a part (default: all three)")
    made.add_argument("--deselect", default="", metavar="MARKERS", help='as for pytest -m, e.g. "not gpu"')
    made.add_argument("--work", type=Path, help="folder for progress and what the tests write (default: temporary)")
    return made.parse_args()


def folders(chosen: Sequence[Path]) -> list[str]:
    """Lists the folders that have tests in the order of their risk, or what was chosen."""
    names = {str(path.resolve().relative_to(ROOT)) for path in chosen or [*(ROOT / "tests").glob("*/")]}
    risk = {f"tests/{name}": at for at, name in enumerate(_FIRST)}
    return sorted(
        (name for name in names if chosen or any((ROOT / name).glob("test_*.py"))), key=lambda n: (risk.get(n, 99), n)
    )


def properties(tests: Sequence[str]) -> list[str]:
    """Lists every test that draws examples, by its pytest name."""
    done = _said([*_PYTEST, "--collect-only", "-m", "hypothesis", *tests], {})
    if done.returncode not in _ENDS:
        raise RuntimeError(f"the tests could not be collected (exit code {done.returncode}):\n{done.stdout[-_TAIL:]}")
    return [line for line in done.stdout.splitlines() if "::" in line]


def run(tests: str, work: Path, words: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Runs a folder, a file, a test or the native tests in a process of their own. `failures` of what it returns are the names
    of tests that failed, `said` is the end of what was printed then. A process that ends otherwise than pytest does fails
    by itself."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tests-", dir=work) as folder:
        if tests in SANITIZERS:
            done = _native_tests(SANITIZERS[tests])
        else:
            done = _said([*_PYTEST, "-m", "", f"--basetemp={folder}/tmp", *words, tests], environment or {}, work)
    good = done.returncode in _ENDS
    failures = [] if good else sorted(set(_FAILED.findall(done.stdout))) or [f"{tests}: exit code {done.returncode}"]
    seconds = round(time.monotonic() - began, 1)
    return {"failures": failures, "said": "" if good else done.stdout[-_TAIL:], "seconds": seconds}


def _build(sanitizer: str) -> Path:
    return ROOT / "build" / f"tests-{sanitizer}"


def _native_tests(sanitizer: str) -> subprocess.CompletedProcess[str]:
    """Runs all native tests side by side, as `scripts/test` does."""
    build = _build(sanitizer)
    plain = ["setarch", os.uname().machine, "-R"]  # ThreadSanitizer wants addresses that are not randomised
    if shutil.which("setarch") is None or subprocess.run([*plain, "true"], capture_output=True).returncode:
        plain = []
    ctest = ["ctest", "--test-dir", str(build), "-j", "2", "--output-on-failure", "--timeout", str(HANGS)]
    return _said([*plain, *ctest], {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"})


def _said(command: Sequence[str], environment: Mapping[str, str], work: Path | None = None) -> subprocess.CompletedProcess[str]:
    drawn = {} if work is None else {"HYPOTHESIS_STORAGE_DIRECTORY": str(work / "hypothesis")}
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **drawn, **environment}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip


class Session:
    """What is asked, and what of it is done already."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        tests = digest(sorted((ROOT / "tests").rglob("*.py")))
        self.progress = Progress(work / "prove_green.jsonl", named=f"{code()} {tests}")

    def repeat(self, part: str, names: Iterable[str], times: int) -> None:
        words = ["-m", self.options.deselect] if self.options.deselect else []
        self._side_by_side(
            (f"{part} {number + 1} of {name}", partial(run, name, self.work, words))
            for name in names
            for number in range(times)
        )

    def draw(self, tests: Sequence[str], examples: int) -> None:
        drawn = {"FUYOU_EXAMPLES": str(examples)}
        self._side_by_side(
            (f"examples of {test}", partial(run, test, self.work, [f"--hypothesis-seed={seed}"], drawn))
            for seed, test in enumerate(tests)
        )

    def _side_by_side(self, jobs: Iterable[tuple[str, Callable[[], dict[str, Any]]]]) -> None:
        """Runs what is not done yet, at most `--side` at a time."""
        pool = ThreadPoolExecutor(self.options.side)
        try:
            for future in [pool.submit(self._once, *job) for job in jobs]:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)  # Ctrl-C does not begin the rest

    def _once(self, key: str, once: Callable[[], dict[str, Any]]) -> None:
        outcome = self.progress.measure(key, once)
        if outcome["failures"]:
            say(f"{key}: FAILED {', '.join(outcome['failures'])}")

    def outcomes(self, keys: Iterable[str]) -> list[dict[str, Any]]:
        return [self.progress.kept[key]["value"] for key in keys if key in self.progress.kept]

    def judged(self, part: str, names: Sequence[str], times: int) -> list[Row]:
        how = "side by side" if part == "runs" else "on a busy machine"
        keys = {name: [f"{part} {number + 1} of {name}" for number in range(times)] for name in names}
        return [_row(f"{name} {how}", f"{times}", self.outcomes(keys[name]), times) for name in names]


def _row(what: str, asked: str, runs: Sequence[Mapping[str, Any]], times: int) -> Row:
    if bad := [one for one in runs if one["failures"]]:
        names = "; ".join(sorted({test for one in bad for test in one["failures"]}))
        values = {"said": [one["said"] for one in bad]}
        return holds(what, asked, f"{len(runs) - len(bad)} of {len(runs)}", False, note=names, values=values)
    if len(runs) < times:
        return missing(what, asked, f"{len(runs)} of {times} done, all passed")
    return holds(what, asked, f"{times} of {times}", True, values={"seconds": [one["seconds"] for one in runs]})


def prove(options: argparse.Namespace, work: Path) -> int:
    names = folders(options.tests)
    parts = options.only or PARTS
    session, rows = Session(options, work), list[Row]()
    for name, sanitizer in SANITIZERS.items() if not options.tests else ():
        if (_build(sanitizer) / "CTestTestfile.cmake").is_file():
            names.append(name)
        else:
            rows.append(missing(name, f"{options.runs}", f"{_build(sanitizer).relative_to(ROOT)}: scripts/test builds it"))
    if "runs" in parts:
        session.repeat("runs", names, options.runs)
        rows += session.judged("runs", names, options.runs)
    if "loaded" in parts:
        with load(work, cores=core_count()):
            session.repeat("loaded", names, options.loaded)
        rows += session.judged("loaded", names, options.loaded)
    if "examples" in parts:
        tests = properties([name for name in names if name not in SANITIZERS])
        session.draw(tests, options.examples)
        rows += [_row(test, f"{options.examples:,}", session.outcomes([f"examples of {test}"]), 1) for test in tests]
    asked = {"runs": options.runs, "loaded": options.loaded, "examples": options.examples, "side": options.side}
    part = "".join(f"-{kind}" for kind in PARTS if options.only and kind in parts) + ("-some" if options.tests else "")
    name = f"{time.strftime('%Y-%m-%d')}-prove_green{part}"  # a part does not replace the record of another
    chosen = names if options.tests else []
    return conclude(name, rows, results=options.results, settings={**asked, "parts": list(parts), "tests": chosen})


def main() -> int:
    options = arguments()
    try:
        with tempfile.TemporaryDirectory(prefix="fuyou-proof-") as scratch:
            work = (options.work or Path(scratch)).resolve()
            work.mkdir(parents=True, exist_ok=True)
            return prove(options, work)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept with --work", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
