"""The screen and the chart of `fuyou bench --model`, and the arithmetic behind them."""

from __future__ import annotations

import io
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from rich.console import Console

from fuyou_cli.cli.render.bench_chart import bench_svg
from fuyou_cli.cli.render.model_bench_screen import show_model_bench
from fuyou_cli.training.modelbench.measured import Measured, seconds_of
from fuyou_cli.training.modelbench.sweep import Point, estimated
from fuyou_cli.training.report import Busy
from tests.step_reports import step_report


def _measured(blocks: int, step: float, each: float) -> Measured:
    return Measured(
        blocks=blocks, parameters=10**9, step_seconds=step, block_seconds=each, tokens=8192, busy={}, waits={}, losses=()
    )


WHOLE = Point(
    batch_size=8, micro_batch_size=2, tokens=8192, parameters=8 * 10**9, step_seconds=4.0, predicted_seconds=3.9,
    bound_seconds=3.6, device_flops=160e12, busy={"compute": 0.9, "ssd read": 0.4}, homes={"weights": "cpu"}, in_memory=2048.0,
)  # fmt: skip
FAR = replace(
    WHOLE, batch_size=16, step_seconds=33.0, in_memory=None, in_memory_why="only some blocks were measured",
    estimates=(estimated(_measured(2, 3.0, 1.0), 32), estimated(_measured(4, 5.0, 1.1), 32)),
)  # fmt: skip


def _shown(width: int, *points: Point) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    show_model_bench(console, "8b", points)
    found = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, found.splitlines())) <= width
    return str(found)


def test_a_block_takes_the_time_from_the_end_of_the_visit_before() -> None:
    spans = [("embedding", 0.0, 1.0), ("block 0", 1.5, 2.0), ("block 1", 2.0, 4.0), ("head", 4.5, 5.0), ("block 1", 5.0, 7.0)]
    timeline = tuple(Busy(resource="compute", label=f"forward {name}", begin=a, end=b) for name, a, b in spans)
    other = Busy(resource="ssd read", label="read block 0", begin=0.0, end=9.0)
    report = step_report(seconds=7.0, timeline=(other, *timeline))
    assert seconds_of(report, {"block 0", "block 1"}) == pytest.approx((1.0 + 2.0 + 2.0) / 2)


def test_estimates_that_differ_by_more_than_a_twentieth_do_not_agree() -> None:
    assert [one.step_seconds for one in FAR.estimates] == pytest.approx([33.0, 35.8])
    assert FAR.apart == pytest.approx(2.8 / 35.8)
    assert not FAR.agrees
    near = replace(FAR, estimates=(estimated(_measured(2, 3.0, 1.09), 32), FAR.estimates[1]))
    assert near.agrees and WHOLE.agrees


def test_figures_of_a_point() -> None:
    assert WHOLE.flops(6) == pytest.approx(98.304e12)
    assert WHOLE.device_share == pytest.approx(0.6144)
    assert WHOLE.overlap == pytest.approx(0.9)


def test_a_step_below_its_bound_says_that_rates_were_measured_too_low() -> None:
    words = "rates were measured too low"
    assert words not in " ".join(_shown(80, WHOLE).split())
    assert words in " ".join(_shown(80, replace(WHOLE, step_seconds=3.0)).split())


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_says_what_is_extrapolated(width: int) -> None:
    shown = " ".join(_shown(width, WHOLE, FAR).split())
    assert "2,048 98.3 131 61% 90% 1.00x" in shown
    assert "33 s*" in shown or "33.0 s*" in shown
    assert "* batch 16 is extrapolated: 2 blocks take 3.0 s" in shown
    assert "the two DO NOT AGREE: 7.8% apart (at most 5%)" in shown
    assert "PyTorch: only some blocks were measured" in shown


def test_the_chart_marks_what_is_extrapolated() -> None:
    chart = ElementTree.fromstring(bench_svg("8b", [WHOLE, FAR]))
    kinds = [one.get("class") for one in chart.iter() if one.get("class")]
    assert (kinds.count("bar"), kinds.count("made"), kinds.count("plain")) == (1, 1, 1)
    assert "* extrapolated from fewer blocks; orange: plain PyTorch in memory" in "".join(chart.itertext())
