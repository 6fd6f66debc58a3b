"""Tests widths, words and streams nobody reads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
