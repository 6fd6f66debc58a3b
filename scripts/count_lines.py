#!/usr/bin/env python3
"""Prints the lines and files of Python in each folder, and how both differ from main. Nothing is judged by them."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAIN = ("origin/main", "main")  # the first that exists


def git(*arguments: str) -> bytes | None:
    """Returns what git prints; None where git or the revision is missing."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def folder(name: str) -> str:
    """`fuyou_cli/cli` for any file below it: the package is split by its rooms, tests and scripts are one each."""
    parts = Path(name).parts
    return "/".join(parts[: 2 if parts[0] == "fuyou_cli" and len(parts) > 2 else 1])


def counts(files: Iterable[tuple[str, bytes]]) -> tuple[Counter[str], Counter[str]]:
    """Returns lines and files by folder."""
    lines: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    for name, text in files:
        lines[folder(name)] += text.count(b"\n")
        numbers[folder(name)] += 1
    return lines, numbers


def of_checkout() -> Iterable[tuple[str, bytes]]:
    for top in ("fuyou_cli", "tests", "scripts"):
        for path in (ROOT / top).rglob("*.py"):
            yield str(path.relative_to(ROOT)), path.read_bytes()


def of_revision(revision: str) -> Iterable[tuple[str, bytes]]:
    listed = git("ls-tree", "-r", "--name-only", revision, "fuyou_cli", "tests", "scripts") or b""
    for name in listed.decode().splitlines():
        if name.endswith(".py"):
            yield name, git("show", f"{revision}:{name}") or b""


def main() -> None:
    lines, numbers = counts(of_checkout())
    revision = next((name for name in MAIN if git("rev-parse", "--verify", "--quiet", name) is not None), None)
    main_lines, main_numbers = counts(of_revision(revision)) if revision else (lines, numbers)
    beside = f"   beside {revision}" if revision else ""
    print(f"{'lines of Python':24}{'lines':>8}{'files':>7}{beside}")
    for name in sorted(lines | main_lines):
        row = f"{name:24}{lines[name]:8,}{numbers[name]:7,}"
        more, files = lines[name] - main_lines[name], numbers[name] - main_numbers[name]
        print(row + (f"{more:+10,}{files:+6,}" if more or files else ""))
    package = [name for name in lines if name.startswith("fuyou_cli")]
    print(f"{'fuyou_cli in all':24}{sum(lines[n] for n in package):8,}{sum(numbers[n] for n in package):7,}")


if __name__ == "__main__":
    main()
