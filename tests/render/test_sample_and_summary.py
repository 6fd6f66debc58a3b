"""Tests that a sample shows what is trained on without colour, and the summary sets the measurement beside the promise."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from rich.cells import cell_len

from fuyou_cli.cli.data_command import show_sample
from fuyou_cli.cli.render.report_screen import ranks, show_summary
from fuyou_cli.core.units import GiB
from fuyou_cli.training.report import RankFigures, RunReport

from .conftest import Printer

PIECES = (("Question: how much is 2 + 2?\n", False), ("It is 4.\n", True), ("</s>", True), (" padding", False))


@pytest.mark.parametrize(("ascii", "mark"), [(False, "▔"), (True, "^")])
def test_marks_stand_under_trained_text(printer: Printer, ascii: bool, mark: str) -> None:
    console, printed = printer(80, ascii=ascii)
    show_sample(console, PIECES)
    lines = printed().splitlines()
    answer = next(index for index, line in enumerate(lines) if "It is 4." in line)
    shown = lines[answer].strip()
    assert lines[answer + 1] == "    " + mark * len(shown)  # the trained line end is visible and marked
    assert shown in ("It is 4.↵", "It is 4.\\n")
    assert lines[answer + 2] == "    </s> padding" and lines[answer + 3] == "    " + mark * 4
    assert mark not in lines[answer - 1]  # the question
    assert "13 of 50 characters" in lines[1]


def test_a_terminal_underlines(printer: Printer) -> None:
    console, printed = printer(80, tty=True)
    show_sample(console, PIECES)
    assert re.search(r"\x1b\[1;4mIt is 4\.", printed()) and "▔" not in printed()


@pytest.mark.parametrize("ascii", [False, True])
def test_samples_cannot_steer_or_overflow(printer: Printer, ascii: bool) -> None:
    console, printed = printer(40, ascii=ascii)
    show_sample(console, [("\x1b[31mred 日本語 " * 20, True), ("x" * 100 + " [bold]\n", False)])
    assert "\\x1b[31mred" in printed() and "[bold]" in printed()
    assert not re.search("[\x00-\x09\x0b-\x1f]", printed())
    assert max(cell_len(line) for line in printed().splitlines()) <= 40
    assert not ascii or printed().isascii()


def test_long_samples_lose_their_middle(printer: Printer) -> None:
    console, printed = printer(80)
    show_sample(console, [("".join(f"line {number}\n" for number in range(100)), False)])
    text = printed()
    assert "line 0" in text and "line 99" in text and "line 50" not in text
    assert "77 lines left out" in text


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("ascii", [False, True])
def test_summary_compares(printer: Printer, run_report: RunReport, width: int, ascii: bool) -> None:
    console, printed = printer(width, ascii=ascii)
    show_summary(console, run_report)
    text = printed()
    assert max(map(len, text.splitlines())) <= width and text.isascii() == ascii
    rows = {line.strip()[:9]: line.split() for line in text.splitlines()}
    assert rows["peak RAM "][-5:] == ["1.84", "GiB", "1.81", "GiB", "-1.8%"]
    assert rows["step     "][-5:] == ["88.4", "s", "86.2", "s", "-2.5%"]
    assert rows["compute u"][-5:] == ["84.0", "s", "82.5", "s", "-1.8%"]
    assert rows["waiting  "][-3:] == ["s", "not", "predicted"]
    assert "  for update of the embedding" in text
    assert rows["ssd writt"][-1] == "0%"
    assert f"4.2137 {'->' if ascii else '→'} 1.8342" in text
    assert "616 GB" in text and "outputs/run" in text and "within the budget of 2.00 GiB" in text
    assert "Loss" in text


def test_a_broken_budget_is_said(printer: Printer, run_report: RunReport) -> None:
    console, printed = printer(80)
    show_summary(console, replace(run_report, ram_peak=3 * GiB, assumed=True))
    assert "over the budget of 2.00 GiB" in printed() and "the plan's rates were assumed" in " ".join(printed().split())


@pytest.mark.parametrize(
    ("steps", "settled", "said"),
    [(40, 37, "medians without the first 3"), (40, 39, "medians without the first;"), (2, 0, "medians without the first;"),
     (1, 0, "of one step, medians;")],
)  # fmt: skip
def test_which_steps_the_figures_are_of(printer: Printer, run_report: RunReport, steps: int, settled: int, said: str) -> None:
    console, printed = printer(120)
    show_summary(console, replace(run_report, steps=steps, settled=settled, assumed=True))
    assert said in " ".join(printed().split())


def test_ranks_tell_every_wait_for_another(run_report: RunReport) -> None:
    others = {"boundary of rank 1": 1.0, "boundary to rank 1": 2.0, "gradients of other ranks": 4.0}
    figures = RankFigures(
        host="box",
        read_per_step=0,
        written_per_step=0,
        written_total=0,
        ram_peak=0,
        waits={**others, "a slot for gradients": 8.0},
    )
    ((_, told),) = ranks(replace(run_report, ranks=(figures,)))
    assert "compute waited 7.0 s of each step for other ranks" in told
