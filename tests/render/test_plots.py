"""Tests loss plot and timelines: positions are checked, not pictures."""

from __future__ import annotations

import itertools
import math
from xml.etree import ElementTree

import pytest

from fuyou_cli.cli.render.charts import HEIGHT, LEFT, PLOT, loss_lines, show_loss, show_timeline, timeline_svg, waiting
from fuyou_cli.training.report import Busy, busy_seconds, merged, phases

from .conftest import Printer

SVG = "{http://www.w3.org/2000/svg}"


def test_a_falling_loss_falls() -> None:
    lines = loss_lines([10.0 - step for step in range(10)], first_step=1, width=40, shades=" #")
    heights = [sum(line[column : column + 1] == "#" for line in lines[:HEIGHT]) for column in range(10, 40)]
    assert heights == sorted(heights, reverse=True) and (heights[0], heights[-1]) == (HEIGHT, 1)
    assert lines[0].startswith("       10 #") and lines[HEIGHT - 1].startswith("        1 #")
    assert lines[-1].split() == ["1", "10"] and max(map(len, lines)) == 40


def test_odd_losses_are_survived() -> None:
    assert loss_lines([], first_step=1, width=60, shades=" #") == []
    assert loss_lines([math.nan, math.inf], first_step=1, width=60, shades=" #") == []
    assert loss_lines([2.0, 1.0], first_step=1, width=10, shades=" #") == []  # no room: nothing, not a mess
    for losses in ([3.0], [2.0] * 5, [0.0, 0.0], [1.0, math.nan, 3.0], [1e-9, 2e-9], [1e6, 2e9]):
        lines = loss_lines(losses, first_step=7, width=60, shades=" .#")
        assert len(lines) == HEIGHT + 1 and max(map(len, lines)) <= 60
        assert "#" in lines[HEIGHT - 1]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("ascii", [False, True])
def test_plots_fit(printer: Printer, timeline: tuple[Busy, ...], width: int, ascii: bool) -> None:
    console, printed = printer(width, ascii=ascii)
    show_loss(console, [2 + math.sin(step / 50) for step in range(3000)])
    show_timeline(console, timeline)
    assert max(map(len, printed().splitlines())) <= width
    assert printed().isascii() == ascii


def test_rows_show_when_a_resource_was_busy(printer: Printer, timeline: tuple[Busy, ...]) -> None:
    console, printed = printer(100, ascii=True)
    show_timeline(console, timeline)
    rows = {line.split("|")[0].strip(): line.split("|")[1:] for line in printed().splitlines() if "|" in line}
    assert list(rows) == ["compute", "update", "ssd read", "ssd write"]
    compute, columns = rows["compute"][0], len(rows["compute"][0])
    middle = [compute[column] for column in range(columns) if 0.6 < column * 18.5 / columns < 16.2]
    assert set(middle) == {"#"}  # busy from 0.5 to 16.5 of 18.5 s
    assert compute[-1] == " " and rows["ssd write"][0][-1] == "#"
    assert [rows[name][1].strip() for name in rows] == ["86%", "9%", "43%", "39%"]


def test_overlapping_intervals_count_once() -> None:
    items = [Busy(resource="ssd read", label="a", begin=begin, end=end) for begin, end in ((0, 2), (1, 3), (5, 6), (5, 5))]
    assert merged(items) == [(0, 3), (5, 6)]
    assert busy_seconds(items) == {"ssd read": 4}
    assert phases(items) == []


def test_waiting_names_the_longest_first() -> None:
    assert waiting({"update": 0.4, "ssd read": 3.1, "h2d": 0.0}) == "compute waited 3.1 s for ssd read, 400 ms for update"
    assert waiting({}) == "compute never waited"


def intervals(svg: str) -> list[tuple[str, float, float, float, float]]:
    """Returns (tooltip, x, width, y, height) of every interval of the picture."""
    found = []
    for shape in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        if shape.get("class", "").startswith("busy"):
            tip = shape.find(f"{SVG}title")
            assert tip is not None and tip.text
            found.append((tip.text, *(float(shape.get(key, "nan")) for key in ("x", "width", "y", "height"))))
    return found


def test_svg_intervals_are_where_time_puts_them(timeline: tuple[Busy, ...]) -> None:
    drawn = intervals(timeline_svg(timeline, title="step 3", stalls={"ssd read": 3.1}))
    assert len(drawn) == len(timeline)
    for item in timeline:
        start = f"{item.label}: {item.begin:.3f} to {item.end:.3f} s"
        ((_, x, width, _, _),) = [entry for entry in drawn if entry[0].startswith(start)]
        assert x == pytest.approx(LEFT + item.begin / 18.5 * PLOT, abs=0.01)
        assert width == pytest.approx((item.end - item.begin) / 18.5 * PLOT, abs=1.0)  # a hairline is left free


def test_svg_requests_in_flight_together_do_not_hide_each_other() -> None:
    items = [
        Busy(resource="ssd read", label=f"r{number}", begin=begin, end=end, bytes=10**9)
        for number, (begin, end) in enumerate(((0.0, 4.0), (1.0, 5.0), (4.0, 6.0), (8.0, 10.0)))
    ]
    drawn = {tip.split(":")[0]: place for tip, *place in intervals(timeline_svg(items, title="t", stalls={}))}
    for first, second in (("r0", "r1"), ("r1", "r2")):
        (_, _, y0, h0), (_, _, y1, h1) = drawn[first], drawn[second]
        assert y0 + h0 <= y1 or y1 + h1 <= y0


def test_many_causes_of_waiting_stand_below_the_legend() -> None:
    items = [Busy(resource="compute", label="forward a", begin=0.0, end=1.0)]
    stalls = {f"weights of the kind of stage number {number}": 1.0 + number for number in range(9)}
    svg = ElementTree.fromstring(timeline_svg(items, title="t", stalls=stalls))
    texts = [(float(node.get("y", 0)), node.text or "") for node in svg.iter(f"{SVG}text")]
    legend = next(y for y, text in texts if text == "backward with recompute")
    waited = [(y, text) for y, text in texts if y > legend]
    assert " ".join(text for _, text in waited).count("weights of the kind") == 9
    assert len(waited) > 2 and all(len(text) <= 118 for _, text in waited)
    assert [y for y, _ in waited] == sorted({y for y, _ in waited}) and waited[-1][0] < float(svg.get("height", 0)) - 8


def test_the_legend_names_the_backward_for_the_norm_where_there_is_one() -> None:
    names, shown = ("forward", "norm", "backward"), "backward that measures the norm"
    items = [Busy(resource="compute", label=f"{name} a", begin=at, end=at + 1.0) for at, name in enumerate(names)]
    for some, there in ((items, True), ([items[0], items[2]], False)):
        svg = ElementTree.fromstring(timeline_svg(some, title="t", stalls={}))
        assert (shown in [node.text for node in svg.iter(f"{SVG}text")]) == there


def test_names_of_phases_never_overlap() -> None:
    """Draws forward and backward that are short beside what came before, and many of them."""
    items = [
        Busy(resource="compute", label=f"{name} a", begin=8.0 + 0.1 * number, end=8.05 + 0.1 * number)
        for number, name in enumerate(("forward", "backward") * 9)
    ]
    svg = ElementTree.fromstring(timeline_svg(items, title="t", stalls={}))
    texts = [
        (node.text or "", float(node.get("x", 0))) for node in svg.iter(f"{SVG}text") if node.get("text-anchor") == "middle"
    ]
    named = sorted((x - 3.5 * len(text), x + 3.5 * len(text)) for text, x in texts if "ward" in text)
    assert 2 <= len(named) < 18 and named[0][0] >= LEFT and named[-1][1] <= LEFT + PLOT
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(named))


def test_svg_is_well_formed_for_any_label() -> None:
    items = [Busy(resource="compute", label='forward <a> & "b" \x1b', begin=0.0, end=1e-4)]
    svg = timeline_svg(items, title="a < b & c", stalls={"ssd <read>": 1.0})
    ((tip, _, width, _, _),) = intervals(svg)
    assert tip.startswith('forward <a> & "b"') and width > 0
    texts = [node.text for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert "a < b & c" in texts and "100%" in texts and "compute waited 1.0 s for ssd <read>" in texts
    assert any(text and text.startswith("forward ") for text in texts)  # the phase is marked
    ElementTree.fromstring(timeline_svg([], title="empty", stalls={}))
