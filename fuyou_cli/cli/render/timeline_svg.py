"""One step as a picture: a self-contained SVG, one row per resource, readable on light and dark pages.

Requests of one resource that are in flight together are drawn in lanes below each other. Every interval carries its
label, times and bytes as a tooltip.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from fuyou_cli.core.units import duration, gb
from fuyou_cli.training.busy import busy_seconds, phases
from fuyou_cli.training.report import Busy

from .theme import ordered
from .timeline import waiting

WIDTH = 1120
LEFT, RIGHT = 112, 196  # room for the names, and for the figures behind the rows
PLOT = WIDTH - LEFT - RIGHT
TOP = 92
ROW, GAP = 34, 12
MAX_LANES = 4
LEAST_WIDTH = 0.6  # of one interval: still visible
LINE, LETTERS = 17, 118  # of the small text below: height, and how many fit beside each other

# (fill on light, fill on dark)
COLOURS: dict[str, tuple[str, str]] = {
    "forward": ("#4c8dd6", "#5b9ee6"),
    "backward": ("#2b5c9e", "#3b77c2"),
    "compute": ("#4c8dd6", "#5b9ee6"),
    "update": ("#9a5bb5", "#b57ad0"),
    "ssd read": ("#2f9e72", "#3fb686"),
    "ssd write": ("#d98324", "#e79a45"),
    "h2d": ("#3aa5b8", "#4fbccf"),
    "d2h": ("#7f8c3a", "#a0ae52"),
}
_OTHER = ("#8a8f98", "#9aa0aa")

_STYLE = """
text{font-family:ui-sans-serif,-apple-system,"Segoe UI",Helvetica,Arial,"DejaVu Sans",sans-serif}
text{font-size:13px;fill:#24292f}
.title{font-size:17px;font-weight:600}.small{font-size:12px;fill:#57606a}.strong{font-weight:600}
.page{fill:#ffffff}.lane{fill:#f3f5f7}.grid{stroke:#d8dde3;stroke-width:1}.phase{stroke:#8b949e;stroke-width:1.5}
rect.busy:hover{opacity:.6}
"""
_DARK = """
text{fill:#e6edf3}.small{fill:#9aa4af}.page{fill:#0f141a}.lane{fill:#1a212a}.grid{stroke:#323b46}.phase{stroke:#76818d}
"""


def timeline_svg(busy: Sequence[Busy], *, title: str, stalls: dict[str, float]) -> str:
    """The SVG document of one step's intervals; `stalls` are seconds compute waited, by cause."""
    end = max((item.end for item in busy), default=0.0) or 1.0
    names = ordered(list(dict.fromkeys(item.resource for item in busy)))
    bottom = TOP + len(names) * (ROW + GAP)
    waited = textwrap.wrap(waiting(stalls), LETTERS)
    height = bottom + 74 + LINE * len(waited)
    used = busy_seconds(busy)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">',
        f"<title>{_text(title)}</title>",
        f"<style>{_style()}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="10"/>',
        f'<text class="title" x="24" y="34">{_text(title)}</text>',
        *_axis(end, bottom),
        *_phase_marks(busy, end),
    ]
    for index, name in enumerate(names):
        items = [item for item in busy if item.resource == name]
        parts += _row(name, items, used.get(name, 0.0), end, TOP + index * (ROW + GAP))
    parts += _legend(bottom + 58, waited, "compute" in names)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _style() -> str:
    light, dark = [], []
    for name, (on_light, on_dark) in {**COLOURS, "other": _OTHER}.items():
        light.append(f".{_kind(name)}{{fill:{on_light}}}")
        dark.append(f".{_kind(name)}{{fill:{on_dark}}}")
    return f"{_STYLE}{''.join(light)}\n@media (prefers-color-scheme:dark){{{_DARK}{''.join(dark)}}}"


def _kind(name: str) -> str:
    return "k-" + name.replace(" ", "-")


def _colour(item: Busy) -> str:
    if item.resource == "compute":
        for phase in ("forward", "backward"):
            if item.label.startswith(phase):
                return _kind(phase)
    return _kind(item.resource if item.resource in COLOURS else "other")


def _at(seconds: float, end: float) -> float:
    return LEFT + seconds / end * PLOT


def _axis(end: float, bottom: int) -> list[str]:
    """Vertical lines at round times, with the seconds under them."""
    spacing = _round_step(end / 8)
    digits = max(0, -math.floor(math.log10(spacing)))
    parts = []
    for number in range(int(end / spacing + 1e-9) + 1):
        x = _at(number * spacing, end)
        parts.append(f'<line class="grid" x1="{x:.2f}" y1="{TOP - 8}" x2="{x:.2f}" y2="{bottom}"/>')
        label = f"{number * spacing:.{digits}f}" + (" s" if number == 0 else "")
        parts.append(f'<text class="small" x="{x:.2f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    return parts


def _round_step(least: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is not less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _phase_marks(busy: Sequence[Busy], end: float) -> list[str]:
    """A bracket over forward and one over backward, named."""
    parts = []
    for name, begin, finish in phases(busy):
        left, right, y = _at(begin, end) + 1, _at(finish, end) - 1, TOP - 18
        parts.append(f'<path class="phase" fill="none" d="M{left:.2f} {y + 7}V{y}H{max(right, left):.2f}V{y + 7}"/>')
        parts.append(
            f'<text class="small" x="{(left + right) / 2:.2f}" y="{y - 7}" text-anchor="middle">'
            f"{name} {duration(finish - begin)}</text>"
        )
    return parts


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placed:
    item: Busy
    lane: int
    lanes: int  # of the group of intervals that overlap one another


def _placed(items: Sequence[Busy]) -> list[_Placed]:
    """Every interval with a lane in which it overlaps nothing, as long as MAX_LANES suffice. Intervals that overlap
    nothing at all get the whole height."""
    placed: list[_Placed] = []
    group: list[tuple[Busy, int]] = []
    free: list[float] = []  # per lane, the time it is free from
    reach = -math.inf
    for item in sorted(items, key=lambda entry: (entry.begin, entry.end)):
        if item.begin >= reach:
            placed += [_Placed(item=old, lane=lane, lanes=len(free)) for old, lane in group]
            group, free = [], []
        lane = next((number for number, time in enumerate(free) if time <= item.begin), len(free))
        if lane == MAX_LANES:
            lane = free.index(min(free))
        free[lane : lane + 1] = [item.end]
        group.append((item, lane))
        reach = max(reach, item.end)
    return placed + [_Placed(item=old, lane=lane, lanes=len(free)) for old, lane in group]


def _row(name: str, items: Sequence[Busy], seconds: float, end: float, y: int) -> list[str]:
    moved = sum(item.bytes for item in items)
    figures = f"{duration(seconds)}" + (f", {gb(moved)}" if moved else "")
    parts = [
        f'<rect class="lane" x="{LEFT}" y="{y}" width="{PLOT}" height="{ROW}" rx="3"/>',
        f'<text class="strong" x="{LEFT - 12}" y="{y + 22}" text-anchor="end">{_text(name)}</text>',
        f'<text class="strong" x="{LEFT + PLOT + 50}" y="{y + 22}" text-anchor="end">{100 * seconds / end:.0f}%</text>',
        f'<text class="small" x="{LEFT + PLOT + 62}" y="{y + 22}">{_text(figures)}</text>',
    ]
    for entry in _placed(items):
        item, height = entry.item, (ROW - 4) / entry.lanes
        x, width = _at(item.begin, end), max((item.end - item.begin) / end * PLOT, LEAST_WIDTH)
        tip = f"{item.label}: {item.begin:.3f} to {item.end:.3f} s ({duration(item.end - item.begin)})"
        if item.bytes:
            span = item.end - item.begin
            tip += f", {gb(item.bytes)}" + (f" at {item.bytes / span / 1e9:.2f} GB/s" if span > 0 else "")
        # A hairline of the row shows between neighbours, where there is room for it.
        gap = 0.7 if width > 3 else 0.0
        parts.append(
            f'<rect class="busy {_colour(item)}" x="{x:.3f}" y="{y + 2 + entry.lane * height:.2f}" '
            f'width="{width - gap:.3f}" height="{height - (0.8 if entry.lanes > 1 else 0):.2f}" '
            f'rx="{1.5 if width > 6 else 0}"><title>{_text(tip)}</title></rect>'
        )
    return parts


def _legend(y: int, waited: Sequence[str], with_compute: bool) -> list[str]:
    parts, x = [], LEFT
    for name in ("forward", "backward") if with_compute else ():
        parts.append(f'<rect class="{_kind(name)}" x="{x}" y="{y - 10}" width="12" height="12" rx="2"/>')
        shown = "backward with recompute" if name == "backward" else name
        parts.append(f'<text class="small" x="{x + 18}" y="{y}">{shown}</text>')
        x += 18 + 7 * len(shown) + 22
    for number, line in enumerate(waited, start=1):
        parts.append(f'<text class="small" x="{LEFT}" y="{y + 4 + LINE * number}">{_text(line)}</text>')
    parts.append(f'<text class="small" x="{LEFT + PLOT + 50}" y="{TOP - 18}" text-anchor="end">busy</text>')
    return parts


def _text(value: str) -> str:
    """Escaped, without the control characters XML does not allow."""
    return escape("".join(letter if letter.isprintable() else " " for letter in value), {'"': "&quot;"})
