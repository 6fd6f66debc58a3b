"""Draws the results of `fuyou bench --model` as a chart: TFLOPS over the batch size, below the device's measured rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from fuyou_cli.core.units import count
from fuyou_cli.training.modelbench.sweep import Point

from .theme import speed, tera

WIDTH, HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 30, 70, 70
_STYLE = """
text{font:13px ui-sans-serif,-apple-system,"Segoe UI",Helvetica,Arial,"DejaVu Sans",sans-serif;fill:#24292f}
.title{font-size:17px;font-weight:600}.small{font-size:12px;fill:#57606a}
.page{fill:#ffffff}.grid{stroke:#d8dde3}.rate{stroke:#8b949e;stroke-dasharray:5 4}
.bar{fill:#4c8dd6}.made{fill:#4c8dd6;fill-opacity:.45;stroke:#4c8dd6;stroke-dasharray:4 3}.plain{stroke:#d98324;stroke-width:3}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9aa4af}.page{fill:#0f141a}.grid{stroke:#323b46}}
"""


def bench_svg(model: str, points: Sequence[Point]) -> str:
    """Draws a bar per batch size (dashed if extrapolated), and a line across it for plain PyTorch."""
    rate = points[0].device_flops
    top = 1.1 * max(rate, *(point.flops(6) for point in points), *(_plain(point) or 0.0 for point in points))
    floor, slot = HEIGHT - _BOTTOM, (WIDTH - _LEFT - _RIGHT) / len(points)

    def y(flops: float) -> float:
        return floor - flops / top * (floor - _TOP)

    title = f"Training {model} ({count(points[0].parameters)} parameters): TFLOPS as 6N"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="10"/>',
        _text(24, 34, title, kind="title"),
        _line("grid", _LEFT, WIDTH - _RIGHT, floor),
        _line("rate", _LEFT, WIDTH - _RIGHT, y(rate)),
        _text(_LEFT - 8, y(rate) + 4, tera(rate), anchor="end"),
        _text(_LEFT - 8, floor + 4, "0", anchor="end"),
        _text(_LEFT, y(rate) - 6, "measured rate of the device"),
    ]
    for number, point in enumerate(points):
        left = _LEFT + (number + 0.2) * slot
        parts += _bar(point, left, 0.6 * slot, y, floor)
    parts.append(_text(WIDTH / 2, HEIGHT - 14, _legend(points), anchor="middle"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(point: Point, left: float, width: float, y: Callable[[float], float], floor: float) -> list[str]:
    height, middle = y(point.flops(6)), left + width / 2
    kind, star = ("made", " *") if point.estimates else ("bar", "")
    found = [
        f'<rect class="{kind}" x="{left:.1f}" y="{height:.1f}" width="{width:.1f}" height="{floor - height:.1f}"/>',
        _text(middle, height - 8, f"{tera(point.flops(6))}{star}", kind="", anchor="middle"),
        _text(middle, floor + 18, f"batch {point.batch_size}", kind="", anchor="middle"),
        _text(middle, floor + 35, f"{speed(point.tokens_per_second)} tokens/s", anchor="middle"),
    ]
    plain = _plain(point)
    return found if plain is None else [*found, _line("plain", left, left + width, y(plain))]


def _plain(point: Point) -> float | None:
    """Returns the FLOP/s of in-memory PyTorch."""
    return None if point.in_memory is None else point.work(6) * point.in_memory


def _legend(points: Sequence[Point]) -> str:
    said = ["* extrapolated from fewer blocks"] if any(point.estimates for point in points) else []
    said += ["orange: plain PyTorch in memory"] if any(point.in_memory is not None for point in points) else []
    return "; ".join(said)


def _line(kind: str, left: float, right: float, y: float) -> str:
    return f'<line class="{kind}" x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}"/>'


def _text(x: float, y: float, words: str, *, kind: str = "small", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
