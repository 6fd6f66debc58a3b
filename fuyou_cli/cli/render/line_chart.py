"""Draws one figure over a run's steps as inline SVG, in the page's colours (the c- classes of report.html)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from .plots import means
from .report_rows import Series

WIDTH, HEIGHT = 440, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 10, 10, 24
_POINTS = 180  # most points: two pixels each
_TICKS = 4


def line_svg(series: Series, *, first_step: int) -> str:
    """Draws the values of the steps from `first_step` on, its marks as dots, and a dashed line at the limit. Steps without a
    value leave a gap. A tooltip at each place shows its value."""
    values, shown, limit = series.values, series.shown, series.limit
    points = means([math.nan if value is None else value for value in values], min(len(values), _POINTS))
    known = [*(value for value in points if math.isfinite(value)), *(value for _, value in series.marks)]
    low, high = (0.0 if series.from_zero else min(known)), max(*known, limit)
    ticks = _round_values(low, high, series.unit)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    wide, tall = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def x(place: float) -> float:
        return _LEFT + (place + 0.5) / len(points) * wide

    def y(value: float) -> float:
        return _TOP + tall * (1 - (value - low) / ((high - low) or 1))

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for tick in ticks:
        parts += [_line("c-grid", y(tick)), _text(_LEFT - 8, y(tick) + 4, shown(tick), "end")]
    if limit:
        parts.append(_line("c-limit", y(limit)))
    parts += _curve([(x(place), y(value)) if math.isfinite(value) else None for place, value in enumerate(points)])
    last = first_step + len(values) - 1
    parts += [_text(_LEFT, HEIGHT - 6, f"step {first_step:,}", "start")]
    parts += [_text(WIDTH - _RIGHT, HEIGHT - 6, f"{last:,}", "end")] if len(values) > 1 else []
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


def _line(kind: str, y: float) -> str:
    return f'<line class="{kind}" x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}"/>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text class="c-text" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
