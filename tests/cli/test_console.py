"""Tests widths, words and streams nobody reads."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fuyou_cli.cli.console import status_console, write_status

from .conftest import environment


@pytest.mark.parametrize(("columns", "width"), [("80", 80), (None, 100), ("0", 100), ("wide", 100), ("-5", 100)])
def test_columns_is_obeyed_off_a_terminal(columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert status_console().width == width


@pytest.mark.parametrize("columns", [40, 80])
def test_lines_break_between_words_on_a_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "swap daemon: " + "O_DIRECT; 16 reads and 16 writes in flight, registered files " * 4
    ours, theirs = os.openpty()
    monkeypatch.setenv("COLUMNS", str(columns))
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        write_status(text)
        lines = os.read(ours, 1 << 16).decode().splitlines()
    os.close(ours)
    assert len(lines) > 1 and max(map(len, lines)) <= columns
    assert " ".join(" ".join(lines).split()) == text.strip()


@pytest.mark.parametrize(
    ("command", "closed", "code", "out", "err"),
    [
        ("validate", ">&-", 1, None, "standard output is closed"),
        ("--help", ">&-", 1, None, "standard output is closed"),
        ("validate train.steps=1", ">&-", 2, None, "train.steps"),
        ("validate", "2>&-", 0, "recipe.yaml", None),
        ("validate train.steps=1", "2>&-", 2, "train.steps", None),
        ("validate --nothing", "2>&-", 2, "No such option", None),
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


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_result_that_a_full_disk_does_not_take_is_told_as_that(unbuffered: str) -> None:
    words = f"exec {sys.executable} -m fuyou_cli --version >/dev/full"
    variables = environment(PYTHONUNBUFFERED=unbuffered)
    done = subprocess.run(["sh", "-c", words], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 4 and "error: No space left on device: standard output" in done.stderr, done
    assert "Exception ignored" not in done.stderr


def test_a_process_without_another_thread_is_not_said_to_be_interrupted() -> None:
    """OpenBLAS raises SIGINT where it cannot start its threads. The limit is of users that are not root."""
    kept = "--inh-caps=-all,+dac_override,+dac_read_search", "--ambient-caps=+dac_override,+dac_read_search"
    program = "import sys; from fuyou_cli.cli.error_screen import report; sys.exit(report(KeyboardInterrupt()))"
    words = f"ulimit -u 1 && exec {sys.executable} -c '{program}'"
    limited = ["setpriv", "--reuid=65533", "--clear-groups", *kept, "bash", "-c", words]
    if shutil.which("setpriv") is None or os.geteuid() != 0:
        pytest.skip("only root may become another user")
    done = subprocess.run(limited, env=environment(), capture_output=True, text=True, check=False)
    if "setpriv" in done.stderr:
        pytest.skip("this root may not")
    assert done.returncode == 1 and "cannot start another thread or process" in done.stderr, done
    assert "ulimit -u" in done.stderr and "interrupted" not in done.stderr


@pytest.mark.parametrize("closed", [">/dev/full", ">&-"])
def test_finished_work_is_told_where_nobody_gets_the_result(closed: str) -> None:
    program = "from fuyou_cli.cli.console import *; prepare_streams(); write_last_result('exported to out')"
    words = f'exec {sys.executable} -c "{program}" {closed}'
    done = subprocess.run(["sh", "-c", words], env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "exported to out\n")


@pytest.mark.parametrize(
    "writes", ["write_status('lost')\n    status_console().print('lost')", "print('lost', file=sys.stderr, flush=True)"]
)
def test_a_closed_stderr_ends_nothing(writes: str) -> None:
    """Neither where the command writes to it, nor where a library does."""
    program = "import sys\nfrom fuyou_cli.cli.console import *\nprepare_streams()\n"
    program += f"for _ in range(3):\n    {writes}\nprint('done')"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=writer, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stdout) == (0, "done\n")


PRINTING = r"""
import logging, sys, warnings
from fuyou_cli.cli.console import prepare_streams, write_status
prepare_streams()
prepare_streams()
from tqdm import tqdm
from transformers.utils import logging as theirs
logging.error("logged \x1b]0;t\x07")
theirs.get_logger("transformers").warning("warned\x1b[2J\u202e")
warnings.warn("said \x9b")
print("printed\x1b[2J\tand\rmore")
print("told\x1b[2J", file=sys.stderr)
list(tqdm(range(2), desc="bar\x1b[2J"))
write_status("ours", lead="\x1b[1mbold\x1b[0m ")
"""


def test_what_libraries_print_cannot_drive_the_terminal() -> None:
    """Neither by loggers of their own, nor by warnings, bars and plain prints; what is ours may be styled."""
    done = subprocess.run([sys.executable, "-c", PRINTING], capture_output=True, text=True, check=True)
    assert done.stdout == "printed\\x1b[2J\tand\\rmore\n"
    ours = "\x1b[1mbold\x1b[0m ours\n"
    assert done.stderr.endswith(ours)
    told = done.stderr.removesuffix(ours)
    assert not set("\x1b\x07\x9b\u202e") & set(told), told
    for word in ("logged \\x1b]0;t\\x07", "warned\\x1b[2J\\u202e", "said \\x9b", "told\\x1b[2J", "bar\\x1b[2J"):
        assert word in told
