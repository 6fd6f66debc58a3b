"""Shows what was asked beside what was measured: rows, their table, their JSON, and progress that a rerun takes over."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from fuyou_cli import __version__
from fuyou_cli.core import probe
from fuyou_cli.machine.profile import core_count, cpu_name

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = {".py", ".c", ".h", ".txt", ".cmake", ".map"}
PASS, FAIL, REPORTED, MISSING, NOISY = "pass", "FAIL", "reported", "not measured", "NOT QUIET"
HELD, FAILED, NOT_SHOWN = 0, 1, 3  # exit codes
EXIT_CODES = textwrap.fill(
    "exit codes: 0 everything that is asked was shown to hold, 1 a line failed, 3 none failed but something that is asked "
    "was not shown (not measured here, others were busy, or compared with a recorded figure), 2 error or usage, "
    "130 interrupted",
    120,
)
Values = Mapping[str, object] | None  # what the JSON keeps beside the line


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Holds one line of the table."""

    what: str
    asked: str
    measured: str
    verdict: str
    note: str = ""
    values: dict[str, object] = field(default_factory=dict)


def at_least(what: str, value: float, bar: float, *, note: str = "", values: Values = None) -> Row:
    return holds(what, f">= {bar:g}", f"{value:.3f}", value >= bar, note=note, values=values)


def at_most(what: str, value: float, bar: float, *, note: str = "", values: Values = None) -> Row:
    return holds(what, f"<= {bar:g}", f"{value:.3f}", value <= bar, note=note, values=values)


def holds(what: str, asked: str, measured: str, ok: bool, *, note: str = "", values: Values = None) -> Row:
    return Row(what=what, asked=asked, measured=measured, verdict=PASS if ok else FAIL, note=note, values=dict(values or {}))


def reported(what: str, measured: str, *, note: str = "", values: Values = None) -> Row:
    return Row(what=what, asked="-", measured=measured, verdict=REPORTED, note=note, values=dict(values or {}))


def unless_noisy(row: Row, results: Sequence[Mapping[str, object]]) -> Row:
    """Returns the row, neither pass nor FAIL if other processes kept the machine busy while it was measured."""
    return replace(row, verdict=NOISY) if any(result.get("noisy") for result in results) else row


def unless_recorded(row: Row, *, recorded: bool) -> Row:
    """Returns the row, neither pass nor FAIL if the other side is a figure of another day: the ratio alone says little."""
    return replace(row, verdict=REPORTED) if recorded else row


def spread(values: Sequence[float]) -> str:
    """Returns the median, the least and the greatest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f}, n={len(values)})"


def in_words(row: Row) -> str:
    """Returns what a bench says of a bar, beside its figure."""
    return {PASS: "holds", FAIL: "MISSED", NOISY: "not judged: NOT QUIET"}[row.verdict]


def missing(what: str, asked: str, why: str) -> Row:
    return Row(what=what, asked=asked, measured="-", verdict=MISSING, note=why)


def exit_code(rows: Iterable[Row]) -> int:
    """Returns FAILED if a line failed, NOT_SHOWN if none did but one that asks for something does not pass either."""
    verdicts = {row.verdict for row in rows if row.asked != "-" or row.verdict == FAIL}
    if FAIL in verdicts:
        return FAILED
    return NOT_SHOWN if verdicts - {PASS} else HELD


def worst(codes: Iterable[int]) -> int:
    """Returns one exit code for several proofs: a failure weighs most, then what was not shown."""
    taken = set(codes)
    return next((code for code in (FAILED, NOT_SHOWN) if code in taken), HELD)


# ---- progress -----------------------------------------------------------------------------------------------------


class Progress:
    """Keeps finished measurements in a file of JSON lines, one object each. What is there is not measured again while the code
    is the same. `named`: the name of that code, if not `code()`: "" if the keys name it."""

    def __init__(self, path: Path, *, named: str | None = None) -> None:
        self.path, self.code, self._lock = path, code() if named is None else named, threading.Lock()
        self.kept: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            whole, _, torn = path.read_bytes().rpartition(b"\n")
            if torn:  # an interrupted write
                path.write_bytes(whole + b"\n" if whole else b"")
            for line in whole.splitlines():
                record = json.loads(line)
                if record.get("code") == self.code:
                    self.kept[record["key"]] = record

    def measure(self, key: str, once: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the measurement `key`: kept from before, or taken now and kept unless it says `failed` or `noisy`."""
        if key in self.kept:
            say(f"{key}: kept, measured {self.kept[key]['date']}")
            return self.kept[key]["value"]
        say(f"{key}: measuring")
        began = time.monotonic()
        value = once()
        if value.get("failed"):
            say(f"{key}: failed: {first_line(value['failed'])}")
            return value
        if value.get("noisy"):
            moved = f", the machine ran at {value['machine']:.2f} of the bench's speed" if value.get("moved") else ""
            say(f"{key}: done, but not kept: others used {value['others_cores']:.2f} cores{moved}")
            return value
        self.keep(key, value)
        say(f"{key}: done in {time.monotonic() - began:.0f} s")
        return value

    def keep(self, key: str, value: dict[str, Any]) -> None:
        """Writes a finished measurement to the file, for this run and later ones."""
        record = {"key": key, "date": now(), "commit": commit(), "code": self.code, "value": value}
        self.kept[key] = record
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


def first_line(text: object) -> str:
    return str(text).partition("\n")[0].rstrip(":")


def say(text: str) -> None:
    """Prints one line about what is going on."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


# ---- the end ------------------------------------------------------------------------------------------------------


def conclude(name: str, rows: Sequence[Row], *, results: Path, settings: dict[str, object], notes: Sequence[str] = ()) -> int:
    """Prints the table and writes `results`/`name`.json. Returns the script's exit code, see `exit_code`."""
    print(table(rows))
    for note in notes:
        print(f"note: {note}")
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{name}.json"
    content = {
        "proof": name,
        "date": now(),
        "settings": settings,
        "machine": machine(),
        "versions": versions(),
        "notes": list(notes),
        "rows": [asdict(row) for row in rows],
    }
    text = json.dumps(content, indent=1).replace(f"{ROOT}/", "")  # a traceback in a row names this checkout
    path.write_text(text + "\n", encoding="utf-8")
    counts = f"{sum(row.verdict == FAIL for row in rows)} of {len(rows)} lines FAILED"
    for verdict in (NOISY, MISSING):
        if number := sum(row.verdict == verdict for row in rows):
            counts += f", {number} {verdict.lower()}"
    print(f"{name}: {counts}; written to {path}")
    return exit_code(rows)


def table(rows: Sequence[Row]) -> str:
    """Returns asked beside measured, in columns as wide as they need, with notes below their line."""
    cells = [("", "asked", "measured", "")] + [(row.what, row.asked, row.measured, row.verdict) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    lines = []
    for number, line in enumerate(cells):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        if number and rows[number - 1].note:
            lines.append(f"    {rows[number - 1].note}")
        if not number:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)


def machine() -> dict[str, object]:
    """Returns what the figures depend on, without the machine's name."""
    return {
        "cpu": cpu_name(),
        "cores": core_count(),
        "memory": probe.physical_memory(),
        "kernel": platform.release(),
        "load": [round(value, 2) for value in os.getloadavg()],
    }


def versions() -> dict[str, str]:
    found = {"fuyou": __version__, "commit": commit(), "python": platform.python_version()}
    for name in ("torch", "transformers", "deepspeed"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit(checkout: Path = ROOT) -> str:
    """Returns a checkout's commit, with a plus if tracked files differ from it; empty outside a checkout."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def plain_parser(description: str | None) -> argparse.ArgumentParser:
    """Makes a parser with what all scripts have."""
    made = argparse.ArgumentParser(
        description=description, epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--results", type=Path, default=ROOT / "scripts" / "results", help="where the JSON goes")
    return made


def show_command(script: str, words: Sequence[str] | None = None) -> None:
    """Prints how the script was started, where and when."""
    print(shlex.join(["python", script, *(sys.argv[1:] if words is None else words)]))
    print(described())


def described() -> str:
    """Returns where and when in one line, for output that is kept as text."""
    return f"{now()}, commit {commit() or 'unknown'}, {cpu_name()}, {core_count()} cores, Linux {platform.release()}"


def code() -> str:
    """Names the code that measures and is measured: the package, the C library, the scripts, the folder of the other side's
    loop, and the extension in use."""
    return digest(code_files())


def code_files() -> list[Path]:
    """Lists the files of `code`."""
    found = [path for folder in ("fuyou_cli", "native") for path in (ROOT / folder).rglob("*") if path.suffix in _SOURCES]
    found += [*ROOT.glob("scripts/proof/*.py"), *ROOT.glob("scripts/proof/*.c"), *ROOT.glob("scripts/prove_*.py")]
    return [*sorted(found), *extension()]


def digest(files: Iterable[Path]) -> str:
    """Returns a digest of the names and contents of these files."""
    held = hashlib.sha256()
    for file in files:
        name = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file.name
        held.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return held.hexdigest()[:12]


def extension() -> list[Path]:
    """Returns the built C extension that a run would load, wherever it is installed. It may be older than its sources."""
    found = importlib.util.find_spec("fuyou_cli._native")
    return [Path(found.origin)] if found is not None and found.origin else []


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S%z")
