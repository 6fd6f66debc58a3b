"""Progress: one line per step off a terminal; on it a block that never exceeds the width; the ETA skips the warm-up."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from rich.console import Console

from fuyou_cli.cli.render.progress import RunDisplay
from fuyou_cli.spec.plan import Plan
from fuyou_cli.training.report import StepReport

Printer = Callable[..., tuple[Console, Callable[[], str]]]


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 1_790_000_000.0

    def __call__(self) -> float:
        return self.now


def report(step: int, seconds: float, *, loss: float = 2.5, stalls: dict[str, float] | None = None) -> StepReport:
    return StepReport(
        step=step,
        total_steps=10,
        loss=loss,
        lr=1e-5,
        grad_norm=0.82,
        tokens=8000,
        batch_tokens=8192,
        seconds=seconds,
        tflops=0.61,
        ram_now=1 << 30,
        ram_peak=3 << 29,
        read_bytes=20 * 10**9,
        written_bytes=10 * 10**9,
        update_cpu_seconds=0.7,
        io_cpu_seconds=0.3,
        stalls={"ssd read": 1.5, "update": 0.1} if stalls is None else stalls,
    )


def test_plain_lines_carry_every_figure(printer: Printer, plan: Plan) -> None:
    console, printed = printer(80)
    with RunDisplay(console, total_steps=10, plan=plan, clock=Clock()) as display:
        display.step(report(1, 20.0))
        display.step(report(2, 10.0, stalls={}))
    first, second = printed().splitlines()
    for part in (
        "step 1/10",
        "loss 2.5000",
        "lr 1.00e-05",
        "gnorm 0.82",
        "409.6 tok/s",
        "0.61 TFLOPS (6N)",
        "20.0 s/step",
        "ram 1.00 peak 1.50 of 2.00 GiB",
        "ssd r 1.00 w 0.50 GB/s",
        "wrote 10 GB",
        "waited 1.5 s for ssd read  waited 100 ms for update",
    ):
        assert part in first
    assert "wrote 20 GB" in second and "no waiting" in second


def test_the_warm_up_step_does_not_spoil_the_eta(printer: Printer, plan: Plan) -> None:
    console, printed = printer(80)
    display = RunDisplay(console, total_steps=10, plan=plan, clock=Clock())
    assert display.step_seconds() == plan.predicted.step_seconds
    display.step(report(1, 100.0))
    assert display.step_seconds() == 100.0  # nothing better yet
    display.step(report(2, 10.0))
    display.step(report(3, 14.0))
    assert display.step_seconds() == 12.0
    assert "eta 84.0 s (at " in printed().splitlines()[-1]  # 7 steps of 12 s


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
    display = RunDisplay(console, total_steps=10, plan=plan, clock=Clock())
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
    assert "step 4/10" in text and "step 5/10" in text and "loss 2.5000" in text
    assert "\x1b[?25h" in printed()  # the cursor is shown again
