"""Tests widths, words and streams nobody reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import environment

PROGRAM = "from fuyou_cli.cli.console import status_console\nprint(status_console().width)"


@pytest.mark.parametrize(("columns", "width"), [("80", "80"), (None, "100"), ("0", "100"), ("wide", "100"), ("-5", "100")])
def test_columns_is_obeyed_off_a_terminal(columns: str | None, width: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    if columns is not None:
        environment["COLUMNS"] = columns
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == width


@pytest.mark.parametrize("columns", [40, 80])
def test_lines_break_between_words_on_a_terminal(columns: int) -> None:
    text = "swap daemon: " + "O_DIRECT; 16 reads and 16 writes in flight, registered files " * 4
    program = f"from fuyou_cli.cli.console import write_status\nwrite_status({text!r})"
    ours, theirs = os.openpty()
    environment = {**os.environ, "COLUMNS": str(columns)}
    subprocess.run([sys.executable, "-c", program], env=environment, stderr=theirs, check=True)
    os.close(theirs)
    lines = os.read(ours, 1 << 16).decode().splitlines()
    os.close(ours)
    assert len(lines) > 1 and max(map(len, lines)) <= columns
    assert " ".join(" ".join(lines).split()) == text.strip()


@pytest.mark.parametrize(
    ("command", "closed", "code", "out", "err"),
    [
        ("validate", ">&-", 1, None, "standard output is closed"),
        ("validate --json", ">&-", 1, None, "standard output is closed"),
        ("doctor", ">&-", 1, None, "standard output is closed"),
        ("--help", ">&-", 1, None, "standard output is closed"),
        ("validate train.steps=1", ">&-", 2, None, "train.steps"),
        ("validate", "2>&-", 0, "recipe.yaml", None),
        ("doctor", "2>&-", 0, "native extension", None),
        ("validate train.steps=1", "2>&-", 2, "train.steps", None),
        ("validate --nothing", "2>&-", 2, "No such option", None),
        ("verify .", "2>&-", 2, "there is no store", None),
        ("validate", ">&- 2>&-", 1, None, None),
        ("validate", "<&- >&- 2>&-", 1, None, None),
        ("validate", "<&-", 0, "recipe.yaml", ""),
        ("init new.yaml", "<&-", 2, "", "there is no terminal"),
    ],
)
def test_closed_streams_are_told_and_nothing_else_gets_their_numbers(
    command: str, closed: str, code: int, out: str | None, err: str | None, recipe: Path, tmp_path: Path
) -> None:
    words = f"exec {sys.executable} -m fuyou_cli {command.replace('validate', f'validate {recipe.name}', 1)} {closed}"
    done = subprocess.run(["sh", "-c", words], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == code, done
    assert (out or "") in done.stdout and (err or "") in done.stderr
    assert (out is not None or not done.stdout) and (err is not None or not done.stderr)
    assert "Traceback" not in done.stdout + done.stderr and "internal error" not in done.stdout + done.stderr


def test_a_closed_stderr_ends_nothing() -> None:
    program = (
        "from fuyou_cli.cli.console import status_console, write_status\n"
        "for _ in range(3):\n    write_status('lost')\n    status_console().print('lost')\nprint('done')"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=writer, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stdout) == (0, "done\n")
