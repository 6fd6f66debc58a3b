"""Draws a run: its loss and a step's timeline on the terminal; a timeline, a figure over the steps, shares of experts as SVG.
The timeline's SVG stands alone; the others have the page's colours (the c- classes of report.html).
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from rich.console import Console
from rich.text import Text

from fuyou_cli.core.units import GiB, MiB, duration, gb, gib
from fuyou_cli.training.report import Busy, busy_seconds, merged, phases

from .theme import RESOURCE_STYLE, heading, ordered, percent, show, symbols

HEIGHT = 9  # rows of the loss plot
_LABEL = 9  # columns of a loss beside it: "1.234e-05"


def waiting(stalls: Mapping[str, float]) -> str:
    """Formats waits as "compute waited 3.1 s for ssd read, 400 ms for update", longest first."""
    named = sorted(((seconds, cause) for cause, seconds in stalls.items() if worth_saying(seconds)), reverse=True)
    if not named:
        return "compute never waited"
    return "compute waited " + ", ".join(f"{duration(seconds)} for {cause}" for seconds, cause in named)


def worth_saying(seconds: float) -> bool:
    """Returns whether a wait is shown as more than "0 ms"."""
    return round(seconds * 1000) >= 1


# ---- the loss --------------------------------------------------------------------------------------------------------


def show_loss(console: Console, losses: Sequence[float], *, first_step: int = 1) -> None:
    """Plots the loss over steps; `losses[0]` is the loss of step `first_step`. Prints nothing if no loss is finite."""
    shades = symbols(console).levels
    lines = loss_lines(losses, first_step=first_step, width=console.width - 2, shades=shades)
    if lines:
        heading(console, "Loss", "over steps")
    for line in lines:
        show(console, Text(line), indent=2)


def loss_lines(losses: Sequence[float], *, first_step: int, width: int, shades: str) -> list[str]:
    """Draws HEIGHT lines with the highest and the lowest loss beside them, and the first and last step below. `shades` are a
    cell's levels. Values that are not finite are left out; each column is the mean of its steps."""
    columns, top = width - _LABEL - 1, len(shades) - 1
    heights = means(losses, columns) if width >= 24 else []
    finite = [mean for mean in heights if math.isfinite(mean)]
    if not finite:
        return []
    low, high = min(finite), max(finite)
    labels = [f"{high:.4g}", *[""] * (HEIGHT - 2), f"{low:.4g}"]
    levels = [  # in cells from the bottom; even the lowest loss is visible
        0.0 if math.isnan(mean) else 1 + (mean - low) / ((high - low) or 1) * (HEIGHT - 1) for mean in heights
    ]
    lines = []
    for row, label in enumerate(labels):
        parts = (min(max(level - (HEIGHT - 1 - row), 0.0), 1.0) for level in levels)
        lines.append(f"{label:>{_LABEL}} " + "".join(shades[round(part * top)] for part in parts).rstrip())
    first, last = f"{first_step:,}", f"{first_step + len(losses) - 1:,}"
    return [*lines, " " * (_LABEL + 1) + first + (last.rjust(columns - len(first)) if len(losses) > 1 else "")]


def means(losses: Sequence[float], columns: int) -> list[float]:
    """Returns the mean of the steps at each column; NaN if none is finite."""
    heights = []
    for column in range(columns):
        begin = column * len(losses) // columns
        end = max(begin + 1, (column + 1) * len(losses) // columns)
        finite = [value for value in losses[begin:end] if math.isfinite(value)]
        heights.append(sum(finite) / len(finite) if finite else math.nan)
    return heights


# ---- a step on the terminal ------------------------------------------------------------------------------------------


def show_timeline(console: Console, busy: Sequence[Busy]) -> None:
    """Shows when each resource was busy in one step: one row per resource, columns are time, darkness is the busy share."""
    shapes, end = symbols(console), max((item.end for item in busy), default=0.0)
    names = ordered(list(dict.fromkeys(item.resource for item in busy)))
    gutter = max(map(len, names), default=0)
    columns = console.width - 2 - gutter - 3 - 5  # indent, name, two edges, percent
    if columns < 8 or end <= 0:
        return
    edge = "│" if shapes.utf8 else "|"
    heading(console, "One step", f"{duration(end)}; darker is busier")
    for name in names:
        spans = merged([item for item in busy if item.resource == name])
        line = Text(f"{name:{gutter}} {edge}")
        line.append(_shaded(spans, end / columns, columns, shapes.shades), style=RESOURCE_STYLE.get(name, ""))
        line.append(f"{edge} {percent(sum(b - a for a, b in spans), end):>4}")
        show(console, line, indent=2)
    show(console, Text(f"{'':{gutter}}  0{duration(end).rjust(columns - 1)}", style="dim"), indent=2)


def _shaded(spans: Sequence[tuple[float, float]], step: float, columns: int, shades: str) -> str:
    """Returns a character per column of `step` seconds: how much of it the spans cover."""
    share = [0.0] * columns
    for begin, finish in spans:
        for column in range(max(int(begin / step), 0), min(int(finish / step) + 1, columns)):
            share[column] += max(min(finish, (column + 1) * step) - max(begin, column * step), 0.0) / step
    top = len(shades) - 1
    return "".join(shades[0 if part < 0.005 else min(max(round(part * top), 1), top)] for part in share)


# ---- a step as SVG ---------------------------------------------------------------------------------------------------

WIDTH = 900  # of a README, which shrinks wider pictures
LEFT, RIGHT = 112, 196  # room for the names, and for the figures behind the rows
PLOT = WIDTH - LEFT - RIGHT
TOP, ROW, GAP = 92, 34, 12
MOST_LANES = 4  # most requests in flight drawn below each other
LEAST_WIDTH = 0.6  # of one interval, so that it stays visible
LINE, LETTERS = 17, 118  # of the text below: height, and letters per line
LETTER = 7  # width of one, at most on average
COLOURS = {  # readable on light and on dark pages
    "forward": "#4c8dd6", "norm": "#7d8fd9", "backward": "#2b5c9e", "update": "#9a5bb5", "ssd read": "#2f9e72",
    "ssd write": "#d98324", "h2d": "#3aa5b8", "d2h": "#7f8c3a", "other": "#8a8f98",
}  # fmt: skip
_STYLE = """
text{font:13px ui-sans-serif,-apple-system,"Segoe UI",Helvetica,Arial,"DejaVu Sans",sans-serif;fill:#24292f}
.title{font-size:17px;font-weight:600}.small{font-size:12px;fill:#57606a}.strong{font-weight:600}
.page{fill:#ffffff}.lane{fill:#f3f5f7}.grid{stroke:#d8dde3}.phase{stroke:#8b949e;stroke-width:1.5}
rect.busy:hover{opacity:.6}
"""
_DARK = """
text{fill:#e6edf3}.small{fill:#9aa4af}.page{fill:#0f141a}.lane{fill:#1a212a}.grid{stroke:#323b46}.phase{stroke:#76818d}
"""


def timeline_svg(busy: Sequence[Busy], *, title: str, stalls: Mapping[str, float]) -> str:
    """Draws one step's intervals, a row per resource, readable on light and dark pages. Labels, times and bytes are
    tooltips. `stalls` is the seconds that compute waited, by cause."""
    end = max((item.end for item in busy), default=0.0) or 1.0
    names = ordered(list(dict.fromkeys(item.resource for item in busy)))
    bottom = TOP + len(names) * (ROW + GAP)
    waited = textwrap.wrap(waiting(stalls), LETTERS)
    height = bottom + 74 + LINE * len(waited)
    colours = "".join(f".{_kind(name)}{{fill:{colour}}}" for name, colour in COLOURS.items())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">',
        f"<title>{_escaped(title)}</title>",
        f"<style>{_STYLE}{colours}\n@media (prefers-color-scheme:dark){{{_DARK}}}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="10"/>',
        _text(24, 34, title, kind="title"),
        _text(LEFT + PLOT + 50, TOP - 18, "busy", anchor="end"),
        *_grid(end, bottom),
        *_phase_marks(busy, end),
    ]
    used = busy_seconds(busy)
    for index, name in enumerate(names):
        items = [item for item in busy if item.resource == name]
        parts += _row(name, items, used.get(name, 0.0), end, TOP + index * (ROW + GAP))
    if "compute" in names:
        parts += _legend(bottom + 58, measures=any(item.label.startswith("norm ") for item in busy))
    parts += [_text(LEFT, bottom + 62 + LINE * number, line) for number, line in enumerate(waited, start=1)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _kind(name: str) -> str:
    return "k-" + name.replace(" ", "-")


def _colour(item: Busy) -> str:
    name = item.label.partition(" ")[0] if item.resource == "compute" else item.resource
    return _kind(name if name in COLOURS else "other")


def _at(seconds: float, end: float) -> float:
    return LEFT + seconds / end * PLOT


def _text(x: float, y: float, words: str, *, kind: str = "small", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.2f}" y="{y}" text-anchor="{anchor}">{_escaped(words)}</text>'


def _escaped(value: str) -> str:
    """Escapes text, without the control characters that XML does not allow."""
    return escape("".join(letter if letter.isprintable() else " " for letter in value), {'"': "&quot;"})


def _grid(end: float, bottom: float) -> list[str]:
    """Draws vertical lines at round times, with the seconds under them."""
    power = 10.0 ** math.floor(math.log10(end / 8))
    spacing = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= end / 8 * (1 - 1e-9))
    digits = max(0, -math.floor(math.log10(spacing)))
    parts = []
    for number in range(int(end / spacing + 1e-9) + 1):
        x = _at(number * spacing, end)
        parts.append(f'<line class="grid" x1="{x:.2f}" y1="{TOP - 8}" x2="{x:.2f}" y2="{bottom}"/>')
        label = f"{number * spacing:.{digits}f}" + (" s" if number == 0 else "")
        parts.append(_text(x, bottom + 18, label, anchor="middle"))
    return parts


def _phase_marks(busy: Sequence[Busy], end: float) -> list[str]:
    """Draws a named bracket over each forward and backward. A name that has no room over its bracket moves to the left; it is
    left out where it would leave the plot."""
    parts, y, free = [], TOP - 18, float(LEFT + PLOT)
    for name, begin, finish in reversed(phases(busy)):
        left, right = _at(begin, end) + 1, max(_at(finish, end) - 1, _at(begin, end) + 1)
        parts.append(f'<path class="phase" fill="none" d="M{left:.2f} {y + 7}V{y}H{right:.2f}V{y + 7}"/>')
        words = f"{name} {duration(finish - begin)}"
        half = len(words) * LETTER / 2
        middle = min((left + right) / 2, free - half)
        if middle - half >= LEFT:
            parts.append(_text(middle, y - 7, words, anchor="middle"))
            free = middle - half - LETTER
    return parts


def _row(name: str, items: Sequence[Busy], seconds: float, end: float, y: int) -> list[str]:
    """Draws one resource: its name, its intervals in lanes, and how busy it was."""
    moved = sum(item.bytes for item in items)
    parts = [
        f'<rect class="lane" x="{LEFT}" y="{y}" width="{PLOT}" height="{ROW}" rx="3"/>',
        _text(LEFT - 12, y + 22, name, kind="strong", anchor="end"),
        _text(LEFT + PLOT + 50, y + 22, f"{100 * seconds / end:.0f}%", kind="strong", anchor="end"),
        _text(LEFT + PLOT + 62, y + 22, duration(seconds) + (f", {gb(moved)}" if moved else "")),
    ]
    free: list[float] = []  # per lane, the time it is free from
    placed = []
    for item in sorted(items, key=lambda entry: (entry.begin, entry.end)):
        lane = next((number for number, time in enumerate(free) if time <= item.begin), len(free))
        if lane == MOST_LANES:
            lane = free.index(min(free))
        free[lane : lane + 1] = [item.end]
        placed.append((item, lane))
    height = (ROW - 4) / max(1, len(free))
    for item, lane in placed:
        x, width = _at(item.begin, end), max((item.end - item.begin) / end * PLOT, LEAST_WIDTH)
        gap = 0.7 if width > 3 else 0.0  # a hairline of the row shows between neighbours
        place = f'x="{x:.3f}" y="{y + 2 + lane * height:.2f}" width="{width - gap:.3f}" height="{height - 0.8:.2f}"'
        parts.append(f'<rect class="busy {_colour(item)}" {place}><title>{_escaped(_tooltip(item))}</title></rect>')
    return parts


def _tooltip(item: Busy) -> str:
    span = item.end - item.begin
    tip = f"{item.label}: {item.begin:.3f} to {item.end:.3f} s ({duration(span)})"
    if item.bytes:
        tip += f", {gb(item.bytes)}" + (f" at {item.bytes / span / 1e9:.2f} GB/s" if span > 0 else "")
    return tip


def _legend(y: int, *, measures: bool) -> list[str]:
    parts, x = [], LEFT
    norm = [("norm", "backward that measures the norm")] if measures else []
    for name, shown in (("forward", "forward"), *norm, ("backward", "backward with recompute")):
        parts.append(f'<rect class="{_kind(name)}" x="{x}" y="{y - 10}" width="12" height="12" rx="2"/>')
        parts.append(_text(x + 18, y, shown))
        x += 18 + 7 * len(shown) + 22
    return parts


# ---- figures over the steps as SVG ------------------------------------------------------------------------------------

CHART_WIDTH, CHART_HEIGHT = 440, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 10, 10, 24
_POINTS = 180  # most points: two pixels each
_TICKS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One figure of every step: its values (None if unknown), and how to format one."""

    name: str
    values: tuple[float | None, ...]
    shown: Callable[[float], str]
    limit: float = 0.0  # a line is drawn here; 0: no line
    from_zero: bool = True
    marks: tuple[tuple[int, float], ...] = ()  # steps, and what was found after them; `note` says what it is
    note: str = ""

    @property
    def unit(self) -> int:
        """Returns the unit of which round values are multiples."""
        highest = max((value for value in self.values if value is not None), default=0.0)
        return 1 if self.shown is not gib else GiB if max(highest, self.limit) >= GiB else MiB

    @property
    def row(self) -> tuple[str, ...]:
        """Returns its name, its first and last value, the median, the least and the most."""
        known = [value for value in self.values if value is not None]
        if not known:
            return (self.name, *["?"] * 5)
        ends = known[0], known[-1], statistics.median(known), min(known), max(known)
        return (self.name, *map(self.shown, ends))


def line_svg(series: Series, *, first_step: int) -> str:
    """Draws the values of the steps from `first_step` on, its marks as dots, and a dashed line at the limit. Steps without a
    value leave a gap. A tooltip at each place shows its value."""
    values, shown, limit = series.values, series.shown, series.limit
    points = means([math.nan if value is None else value for value in values], min(len(values), _POINTS))
    known = [*(value for value in points if math.isfinite(value)), *(value for _, value in series.marks)]
    low, high = (0.0 if series.from_zero else min(known)), max(*known, limit)
    ticks = _round_values(low, high, series.unit)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    wide, tall = CHART_WIDTH - _LEFT - _RIGHT, CHART_HEIGHT - _TOP - _BOTTOM

    def x(place: float) -> float:
        return _LEFT + (place + 0.5) / len(points) * wide

    def y(value: float) -> float:
        return _TOP + tall * (1 - (value - low) / ((high - low) or 1))

    parts = [f'<svg viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}" role="img">']
    for tick in ticks:
        parts += [_rule("c-grid", y(tick)), _label(_LEFT - 8, y(tick) + 4, shown(tick), "end")]
    if limit:
        parts.append(_rule("c-limit", y(limit)))
    parts += _curve([(x(place), y(value)) if math.isfinite(value) else None for place, value in enumerate(points)])
    last = first_step + len(values) - 1
    parts += [_label(_LEFT, CHART_HEIGHT - 6, f"step {first_step:,}", "start")]
    parts += [_label(CHART_WIDTH - _RIGHT, CHART_HEIGHT - 6, f"{last:,}", "end")] if len(values) > 1 else []
    for place, value in enumerate(points):
        step = first_step + place * len(values) // len(points)
        tip = f"step {step:,}: {shown(value) if math.isfinite(value) else 'not finite'}"
        left = _LEFT + place / len(points) * wide
        box = f'x="{left:.2f}" y="{_TOP}" width="{wide / len(points):.2f}" height="{tall}"'
        parts.append(f'<rect class="c-hover" {box}><title>{escape(tip)}</title></rect>')
    for step, value in series.marks:
        at = x(max(-0.5, (step - first_step + 0.5) * len(points) / len(values) - 0.5))
        tip = f"after step {step:,}: {shown(value)}"
        parts.append(f'<circle class="c-mark" cx="{at:.1f}" cy="{y(value):.1f}" r="3"><title>{escape(tip)}</title></circle>')
    return "".join([*parts, "</svg>"])


def shares_svg(counts: Sequence[int]) -> str:
    """Draws the share of each expert as a bar, and an even share as a dashed line. A tooltip tells the share."""
    even, wide, tall = sum(counts) / len(counts) or 1.0, max(1.0, 240 / len(counts)), 28
    top = max(2.0, max(counts) / even)
    size = f"{wide * len(counts):.1f}"
    parts = [f'<svg viewBox="0 0 {size} {tall}" width="{size}" height="{tall}" role="img">']
    for number, count in enumerate(counts):
        high = tall * count / even / top
        place = f'x="{number * wide:.2f}" width="{wide * 0.8:.2f}"'
        parts.append(f'<rect class="c-bar" {place} y="{tall - high:.2f}" height="{high:.2f}"/>')
        tip = f"<title>expert {number}: {count / even:.2f} x even</title>"
        parts.append(f'<rect class="c-hover" {place} y="0" height="{tall}">{tip}</rect>')
    parts.append(f'<line class="c-limit" x1="0" x2="{size}" y1="{tall * (1 - 1 / top):.2f}" y2="{tall * (1 - 1 / top):.2f}"/>')
    return "".join([*parts, "</svg>"])


def _round_values(low: float, high: float, unit: int) -> list[float]:
    """Returns about `_TICKS` round numbers of units, from below `low` to above `high`."""
    span = ((high - low) or abs(high) or 1.0) / unit
    power = 10.0 ** math.floor(math.log10(span / _TICKS))
    spacing = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= span / _TICKS * (1 - 1e-9))
    spacing *= unit
    return [number * spacing for number in range(math.floor(low / spacing), math.ceil(high / spacing) + 1)]


def _curve(points: Sequence[tuple[float, float] | None]) -> list[str]:
    """Draws a line through neighbouring points; a point without neighbours is a dot."""
    runs: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(point)
    drawn = []
    for run in filter(None, runs):
        if len(run) == 1:
            drawn.append(f'<circle class="c-dot" cx="{run[0][0]:.1f}" cy="{run[0][1]:.1f}" r="2.5"/>')
        else:
            drawn.append(f'<polyline class="c-curve" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in run)}"/>')
    return drawn


def _rule(kind: str, y: float) -> str:
    return f'<line class="{kind}" x1="{_LEFT}" y1="{y:.1f}" x2="{CHART_WIDTH - _RIGHT}" y2="{y:.1f}"/>'


def _label(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text class="c-text" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
