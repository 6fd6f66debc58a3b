"""Tests progress: one line per step off a terminal; on it a block that never exceeds the width; the ETA skips the warm-up."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from fuyou_cli.cli.render.progress import LINE_SECONDS, RunDisplay, TransferDisplay, counting
from fuyou_cli.spec.plan import Plan
from fuyou_cli.training.report import StepReport
from tests.step_reports import step_report

from .conftest import Printer


class Clock:
    """Counts seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 1_790_000_000.0

    def __call__(self) -> float:
        return self.now


def report(step: int, seconds: float, *, loss: float = 2.5, stalls: dict[str, float] | None = None) -> StepReport:
    return step_report(
        step, loss=loss, seconds=seconds, grad_norm=0.82, tokens=8000, batch_tokens=8192, tflops=0.61, ram_now=1 << 30,
        ram_peak=3 << 29, read_bytes=20 * 10**9, written_bytes=10 * 10**9,
        stalls={"ssd read": 1.5, "update": 0.1} if stalls is None else stalls,
    )  # fmt: skip


@pytest.mark.parametrize("total", [10, 100_000])
@pytest.mark.parametrize("seconds", [0.02, 20.0, 90_000.0])
def test_plain_lines_are_aligned_and_fit(printer: Printer, plan: Plan, total: int, seconds: float) -> None:
    """Prints one line of 100 columns at most for each step, a figure at the same column in all of them."""
    console, printed = printer(80)
    with RunDisplay(console, total_steps=total, plan=replace(plan, cpu_budget=900 << 30), clock=Clock()) as display:
        display.step(report(1, seconds, loss=12.5))
        display.step(replace(report(2, seconds, loss=float("nan")), grad_norm=123456.0, skipped="the gradients are not finite"))
        display.step(replace(report(3, 1.5 * seconds), grad_norm=1.5e-7, ram_peak=700 << 30))
    lines = printed().splitlines()
    assert len(lines) == 3 and max(map(len, lines)) <= 100
    first, second, _ = lines
    for part in ("loss 12.5000", "gnorm 0.82", " tok/s", "/step", "eta "):
        assert part in first, part
    assert ("lr 1.00e-05" in first, "skipped" in second) == (total == 10, total == 10)
    for word in ("loss", "gnorm", "tok/s", "/step", "eta"):
        assert len({line.index(word) for line in lines}) == 1, word
    assert not any(word in printed() for word in ("ssd r", "wrote", "wait", "TFLOPS"))


def test_traffic_and_waits_with_v(printer: Printer, plan: Plan) -> None:
    console, printed = printer(80)
    with RunDisplay(console, total_steps=10, plan=plan, verbose=True, clock=Clock()) as display:
        display.step(report(1, 20.0))
        display.step(report(2, 10.0, stalls={}))
    text = printed()
    assert max(map(len, text.splitlines())) <= 100
    for part in (
        "step  1/10",
        "loss  2.5000",
        "lr 1.00e-05",
        "gnorm 0.82",
        "409.6 tok/s",
        "0.610 TFLOPS (6N)",
        "20.0 s/step",
        "ram 1.00 GiB now",
        "ssd r 1.00 w 0.50 GB/s",
        "wrote 10 GB",
        "waited 1.5 s for ssd read",
        "waited 100 ms for update",
        "wrote 20 GB",
        "no waiting",
    ):
        assert part in text, part


def test_the_warm_up_step_does_not_spoil_the_eta(printer: Printer, plan: Plan) -> None:
    console, printed = printer(80)
    display = RunDisplay(console, total_steps=10, plan=plan, clock=Clock())
    assert display.step_seconds() == plan.predicted.step_seconds
    display.step(report(1, 100.0))
    assert display.step_seconds() == 100.0  # nothing better yet
    display.step(report(2, 10.0))
    display.step(report(3, 14.0))
    assert display.step_seconds() == 12.0
    assert "eta 84.0 s" in printed().splitlines()[-1]  # 7 steps of 12 s


@pytest.mark.parametrize("width", [20, 40, 80, 120])
@pytest.mark.parametrize("ascii", [False, True])
def test_the_block_is_never_too_wide(printer: Printer, plan: Plan, width: int, ascii: bool) -> None:
    console, _ = printer(width, ascii=ascii)
    clock = Clock()
    display = RunDisplay(console, total_steps=10, plan=plan, clock=clock)
    heights = []
    for step in range(1, 11):
        display.step(report(step, 10.0, loss=float("nan") if step == 4 else 2.5))
        clock.now += 5
        lines = display.lines(width)
        heights.append(len(lines))
        assert all(line.cell_len <= width for line in lines)
        assert not ascii or all(line.plain.isascii() for line in lines)
    assert heights == sorted(heights)  # it may grow, never shrink
    assert "step 10/10" in display.lines(width)[0].plain


def test_every_wait_is_shown_in_80_columns(printer: Printer, plan: Plan) -> None:
    console, _ = printer(80)
    display = RunDisplay(console, total_steps=10, plan=plan, verbose=True, clock=Clock())
    waits = {"weights": 1234.5, "gradient slot": 0.25, "boundary": 12.5, "step end": 100.0, "none": 0.0, "nothing seen": 0.0004}
    display.step(report(1, 2000.0, stalls=waits))
    lines = display.lines(80)
    assert all(line.cell_len <= 80 for line in lines)
    text = " ".join(" ".join(line.plain for line in lines).split())
    shown = [text.index(f"for {cause}") for cause in ("weights", "step end", "boundary", "gradient slot")]
    assert shown == sorted(shown) and "for none" not in text and "nothing seen" not in text


def test_the_bar_moves_within_a_step(printer: Printer, plan: Plan) -> None:
    console, _ = printer(80)
    clock = Clock()
    display = RunDisplay(console, total_steps=10, plan=plan, clock=clock)
    display.step(report(1, 10.0))
    clock.now += 5
    assert " 15%" in display.lines(80)[0].plain  # one and a half steps of ten
    clock.now += 1000
    assert " 20%" in display.lines(80)[0].plain  # a late step is not counted as done


def test_a_terminal_gets_a_live_block(printer: Printer, plan: Plan) -> None:
    console, printed = printer(80, tty=True)
    with RunDisplay(console, total_steps=10, plan=plan, resumed=4, clock=Clock()) as display:
        display.step(report(5, 10.0))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed())
    assert "step 4/10" in text and "step 5/10" in text and "loss  2.5000" in text
    assert "\x1b[?25h" in printed()  # the cursor is shown again


# ---- downloads and exports -------------------------------------------------------------------------------------------


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


def test_a_pipe_gets_nothing_of_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with counting("reading", 3) as done:
        done(1)
    assert capsys.readouterr() == ("", "")


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
