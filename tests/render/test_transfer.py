"""Tests downloads and exports on a terminal and in a pipe: what is drawn stays apart from what follows; a pipe gets few
lines."""

from __future__ import annotations

import io

from rich.console import Console

from fuyou_cli.cli.render.progress import LINE_SECONDS, TransferDisplay


def test_a_pipe_gets_a_line_now_and_then() -> None:
    stream, now = io.StringIO(), [0.0]
    with TransferDisplay(Console(file=stream, width=100), clock=lambda: now[0]) as transfers:
        transfers("downloading o/small", 0, 10)
        transfers("downloading o/small", 10, 10)
        for second in range(101):
            now[0] = float(second)
            transfers("downloading o/model", second * 10**9, 100 * 10**9)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 100 / LINE_SECONDS
    assert lines[0] == "downloading o/model: 10 GB of 100 GB (10%)" and lines[-1].endswith("(100%)")


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=100, force_terminal=True, color_system=None)
    with TransferDisplay(console) as transfers:
        transfers("downloading o/model", 5 * 10**8, 10**9)
        assert "downloading o/model" in stream.getvalue() and "/1.0 GB" in stream.getvalue()
        transfers("downloading o/model", 10**9, 10**9)
        assert stream.getvalue().endswith("\x1b[?25h\r\x1b[1A\x1b[2K")  # cursor shown, the line cleared
        transfers("exporting to model", 1, 2)
    assert "exporting to model" in stream.getvalue()
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 2  # also when left in the middle
