#!/usr/bin/env python3
"""Shows that green means green: no test fails by luck, by its neighbours or on a busy machine.

    python scripts/prove_green.py --work DIR
    hours on two cores; the same command continues at any point; to try it: tests/unit --runs 2 --loaded 1 --examples 200

Every test file runs `--runs` times. Then it runs `--loaded` times while more processes than cores compute, touch memory, and
write and flush files. Short files of one folder share a process of about a minute. Another process runs beside it (`--side`),
usually the next run of the same files. Each file's outcome is kept until it, or something that it imports of this project,
changes (of tests that start programs: any code). Every property draws `--examples` examples, in pieces with a seed each, the
fastest property first. The native tests count as two files, one per sanitizer, if `scripts/test` has built them. Files and
folders may be named; `--only` picks parts. The runs take a little more than 13 times the processor time of `scripts/test -m
''`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proof import green
from proof.green import load
from proof.verdicts import ROOT, Progress, Row, code_files, conclude, digest, holds, missing, plain_parser, say

from fuyou_cli.machine.profile import core_count

KINDS = ("runs", "loaded", "examples")
BATCH_SECONDS, UNKNOWN_SECONDS = 60.0, 15.0  # of the files of one process; of a file that has not run yet
FIRST_PIECE, PIECE_SECONDS = 100, 1200.0  # examples that tell what one costs, then pieces of about this length
NATIVE = [f"native ({sanitizer} sanitizer)" for sanitizer in green.SANITIZERS]


def arguments() -> argparse.Namespace:
    made = plain_parser(__doc__)
    made.add_argument("tests", nargs="*", type=Path, help="files or folders of tests (default: all, and the native ones)")
    made.add_argument("--runs", type=int, default=10, help="of every file")
    made.add_argument("--loaded", type=int, default=3, help="of every file on a busy machine")
    made.add_argument("--examples", type=int, default=20_000, help="of every property")
    made.add_argument("--side", type=int, default=2, help="processes at once")
    made.add_argument("--only", choices=KINDS, action="append", help="a part (default: all three)")
    made.add_argument("--deselect", default="", metavar="MARKERS", help='as for pytest -m, e.g. "not gpu"')
    made.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin nothing new after this long, and say how far it is"
    )
    made.add_argument("--work", type=Path, help="folder for progress and what the tests write (default: temporary)")
    return made.parse_args()


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """Holds what is asked, what is already done, and until when more is begun."""

    options: argparse.Namespace
    work: Path
    progress: Progress
    until: float
    tested: dict[str, str]  # what is run -> a name for its content

    def key(self, kind: str, name: str, number: int) -> str:
        return f"{kind} {number} of {name} [{self.tested[name.partition('::')[0]]}]"

    def outcomes(self, kind: str, name: str) -> list[dict[str, Any]]:
        """Returns the outcomes of runs or pieces that are over."""
        begin, end = f"{kind} ", f" of {name} [{self.tested[name.partition('::')[0]]}]"
        kept = list(self.progress.kept.items())  # others add to it meanwhile
        return [record["value"] for key, record in kept if key.startswith(begin) and key.endswith(end)]

    def seconds(self, name: str) -> float:
        """Returns how long a file takes, according to its runs so far."""
        return max((run["seconds"] for run in self.outcomes("runs", name)), default=UNKNOWN_SECONDS)

    def side_by_side(self, jobs: Iterable[Callable[[], object]]) -> None:
        """Begins one after the other, at most `--side` at a time, until time is up."""
        waiting, lock = iter(jobs), threading.Lock()

        def work() -> None:
            while time.monotonic() < self.until:
                with lock:
                    job = next(waiting, None)
                if job is None:
                    return
                job()

        with ThreadPoolExecutor(self.options.side) as pool:
            for done in [pool.submit(work) for _ in range(self.options.side)]:
                done.result()


# ---- runs ----------------------------------------------------------------------------------------------------------


def batches(session: Session, names: Sequence[str]) -> list[list[str]]:
    """Divides the files into processes: neighbours of one folder, as many as take about a minute together."""
    made: list[list[str]] = []
    folder, left = "", 0.0
    for name in names:
        seconds = session.seconds(name)
        if name.rpartition("/")[0] != folder or seconds > left or name in NATIVE:
            made.append([])
            folder, left = name.rpartition("/")[0], BATCH_SECONDS
        made[-1].append(name)
        left -= seconds
    return made


def run_all(session: Session, kind: str, names: Sequence[str], times: int) -> None:
    """Runs every file so often. The first runs show how long a file takes, and so which files share its process later."""
    together = min(times, session.options.side)
    for numbers in (range(1, together + 1), range(together + 1, times + 1)):
        jobs = [(batch, number) for batch in batches(session, names) for number in numbers]
        session.side_by_side((lambda job=job: run_batch(session, kind, *job)) for job in jobs)


def run_batch(session: Session, kind: str, batch: Sequence[str], number: int) -> None:
    """Runs those of the files whose outcome of this number is not kept yet."""
    left = [name for name in batch if session.key(kind, name, number) not in session.progress.kept]
    if not left:
        return
    say(f"{kind} {number}: {', '.join(left)}")
    if left[0] in NATIVE:
        outcomes = {left[0]: green.native_tests(green.SANITIZERS[NATIVE.index(left[0])], session.work)}
    else:
        words = ["-m", session.options.deselect] if session.options.deselect else []
        outcomes = green.run_files(left, work=session.work, words=words)
    for name, outcome in outcomes.items():
        session.progress.keep(session.key(kind, name, number), outcome.kept())
        if outcome.failures:
            say(f"{kind} {number} of {name}: FAILED {', '.join(outcome.failures)}")


def judged(session: Session, kind: str, names: Sequence[str], times: int) -> list[Row]:
    """Returns a row per folder, and one per file with failures."""
    rows, folders = [], dict[str, list[str]]()
    for name in names:
        folders.setdefault("/".join(name.split("/")[:2]), []).append(name)
    how = "side by side" if kind == "runs" else "on a busy machine"
    for folder, members in folders.items():
        over = {name: session.outcomes(kind, name) for name in members}
        failed = {name: runs for name, runs in over.items() if any(run["failures"] for run in runs)}
        for name, runs in failed.items():
            whole = sum(not run["failures"] for run in runs)
            tests = sorted({test for run in runs for test in run["failures"]})
            values = {"failures": [run["failures"] for run in runs if run["failures"]]}
            rows.append(
                holds(f"{name} {how}", f"{times}", f"{whole} of {len(runs)}", False, note="; ".join(tests), values=values)
            )
        good = [name for name in members if name not in failed]
        if not good:
            continue
        tests = sum(max((run["tests"] for run in over[name]), default=0) for name in good)
        least = min(len(over[name]) for name in good)
        what, runs = f"{folder} {how}: {len(good)} files, {tests} tests", sum(len(over[name]) for name in good)
        values = {
            "files": {name: len(over[name]) for name in good},
            "test_runs": sum(run["tests"] for n in good for run in over[n]),
        }
        if least >= times:
            rows.append(holds(what, f"{times}", f"{least} of {least}", True, values=values))
        else:
            done = f"{runs} of {times * len(good)} runs, all passed"
            rows.append(missing(what, f"{times}", done))
    return rows


# ---- examples ------------------------------------------------------------------------------------------------------


def drawn(pieces: Sequence[dict[str, Any]]) -> int:
    return sum(piece["drawn"] for piece in pieces)


def seconds_each(pieces: Sequence[dict[str, Any]]) -> float:
    return sum(piece["seconds"] for piece in pieces) / max(1, drawn(pieces))


def is_over(pieces: Sequence[dict[str, Any]], asked: int) -> bool:
    """Tells whether a property is done. A failure ends it too: other pieces would find the same."""
    return drawn(pieces) >= asked or any(piece["exhausted"] or piece["failures"] for piece in pieces)


def draw_all(session: Session, tests: Sequence[str], asked: int) -> None:
    """Draws a few examples of each property to learn what one costs, then the rest, the fastest property first."""

    def piece(test: str, examples: int) -> None:
        number = len(session.outcomes("examples", test)) + 1
        key = session.key("examples", test, number)
        session.progress.measure(key, lambda: green.draw(test, examples, number, session.work).kept())

    def rest(test: str) -> None:
        pieces = session.outcomes("examples", test)
        while not is_over(pieces, asked) and time.monotonic() < session.until:
            many = int(PIECE_SECONDS / max(1e-6, seconds_each(pieces)))
            piece(test, max(1, min(many, asked - drawn(pieces))))
            pieces = session.outcomes("examples", test)

    first = [test for test in tests if not session.outcomes("examples", test)]
    session.side_by_side((lambda test=test: piece(test, min(FIRST_PIECE, asked))) for test in first)
    known = [test for test in tests if session.outcomes("examples", test)]
    ordered = sorted(known, key=lambda test: seconds_each(session.outcomes("examples", test)))
    session.side_by_side((lambda test=test: rest(test)) for test in ordered)


def judged_examples(session: Session, tests: Sequence[str], asked: int) -> list[Row]:
    rows, whole = [], dict[str, int]()
    for test in tests:
        pieces = session.outcomes("examples", test)
        failures = {name: text for piece in pieces for name, text in piece["failures"].items()}
        if failures:
            rows.append(holds(test, f"{asked:,}", f"{drawn(pieces):,}", False, values={"failures": failures}))
        elif is_over(pieces, asked):
            whole[test] = drawn(pieces)
        else:
            each = f", {seconds_each(pieces):.2f} s each" if pieces else ""
            rows.append(missing(test, f"{asked:,}", f"{drawn(pieces):,} drawn, all passed{each}"))
    if whole:
        what = f"{len(whole)} of {len(tests)} properties: all their examples, or every one that there is"
        rows.insert(0, holds(what, f"{asked:,}", f"{sum(whole.values()):,} drawn", True, values={"drawn": whole}))
    return rows


# ---- all of it -----------------------------------------------------------------------------------------------------


def content(names: Iterable[str]) -> dict[str, str]:
    """Names each file's content together with that of what its outcome depends on."""
    return {name: digest(green.sources(ROOT / name) if name not in NATIVE else code_files()) for name in names}


def prove(options: argparse.Namespace, work: Path) -> int:
    names = [green.name_of(path) for path in green.files(options.tests)] + ([] if options.tests else NATIVE)
    kinds = options.only or KINDS
    tests = green.properties(options.tests, work) if "examples" in kinds else []
    progress = Progress(work / "prove_green.jsonl", named="")  # the keys hold its digest
    until = time.monotonic() + options.seconds
    session = Session(options=options, work=work, progress=progress, until=until, tested=content(names))
    rows: list[Row] = []
    if "runs" in kinds:
        run_all(session, "runs", names, options.runs)
        rows += judged(session, "runs", names, options.runs)
    if "loaded" in kinds:
        with load(work, cores=core_count()):
            run_all(session, "loaded", names, options.loaded)
        rows += judged(session, "loaded", names, options.loaded)
    if "examples" in kinds:
        draw_all(session, tests, options.examples)
        rows += judged_examples(session, tests, options.examples)
    asked = {"runs": options.runs, "loaded": options.loaded, "examples": options.examples, "side": options.side}
    chosen = [green.name_of(path) for path in options.tests]
    part = "".join(f"-{kind}" for kind in KINDS if options.only and kind in kinds) + ("-some" if chosen else "")
    name = f"{time.strftime('%Y-%m-%d')}-prove_green{part}"  # a part does not replace the record of another
    return conclude(name, rows, results=options.results, settings={**asked, "parts": list(kinds), "tests": chosen})


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
