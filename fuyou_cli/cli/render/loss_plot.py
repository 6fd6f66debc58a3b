"""The loss as a plot for the terminal: braille dots, or stars where only ASCII can be shown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from .theme import heading, show, symbols

HEIGHT = 9  # rows of characters
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # braille bit of (row, column) in a 4 x 2 cell


def show_loss(console: Console, losses: Sequence[float], *, first_step: int = 1, height: int = HEIGHT) -> None:
    """Loss over steps, `losses[0]` being of step `first_step`. Nothing when no loss is finite."""
    lines = loss_lines(losses, first_step=first_step, width=console.width - 2, height=height, utf8=symbols(console).utf8)
    if not lines:
        return
    heading(console, "Loss", "over steps")
    for line in lines:
        show(console, Text(line), indent=2)


def loss_lines(losses: Sequence[float], *, first_step: int, width: int, height: int, utf8: bool) -> list[str]:
    """The plot as `height` lines with a value axis, then the step axis in two lines. Values that are not finite are
    left out; where there are more steps than dots each dot is a mean."""
    finite = [value for value in losses if math.isfinite(value)]
    if not finite or width < 24 or height < 2:
        return []
    low, high = min(finite), max(finite)
    if high == low:
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    digits = max(0, 3 - math.floor(math.log10(high - low)) - 1) if high - low < 100 else 0
    labels = [f"{high - (high - low) * row / (height - 1):.{digits}f}" for row in range(height)]
    gutter = max(map(len, labels))
    columns = width - gutter - 2
    across, down = (2, 4) if utf8 else (1, 1)
    grid = _Raster(columns * across, height * down)
    points = _points(losses, columns * across)
    for (x0, y0), (x1, y1) in zip(points, points[1:] or points, strict=False):
        grid.line(x0, (high - y0) / (high - low), x1, (high - y1) / (high - low))
    tick, corner, floor = ("┤", "└", "─") if utf8 else ("|", "+", "-")
    rows = grid.braille(columns) if utf8 else grid.stars()
    every = 2 if height > 4 else 1
    lines = []
    for number, (label, row) in enumerate(zip(labels, rows, strict=True)):
        shown = label if number % every == 0 or number == height - 1 else ""
        lines.append(f"{shown:>{gutter}} {tick}{row}".rstrip())
    lines.append(f"{'':>{gutter}} {corner}{floor * columns}")
    lines.append(" " * (gutter + 2) + _step_axis(first_step, first_step + len(losses) - 1, columns))
    return lines


def _points(losses: Sequence[float], dots: int) -> list[tuple[int, float]]:
    """(column of dots, mean loss) from left to right."""
    count = len(losses)
    bins: dict[int, list[float]] = {}
    for index, value in enumerate(losses):
        if math.isfinite(value):
            x = round(index * (dots - 1) / (count - 1)) if count > 1 else 0
            bins.setdefault(x, []).append(value)
    return [(x, sum(values) / len(values)) for x, values in sorted(bins.items())]


def _step_axis(first: int, last: int, columns: int) -> str:
    """Step numbers at both ends and, with room, in the middle."""
    left, right = f"{first:,}", f"{last:,}"
    if first == last:
        return left
    middle = f"{(first + last) // 2:,}"
    line = left + " " * max(columns - len(left) - len(right), 1) + right
    start = columns // 2 - len(middle) // 2
    if last - first > 1 and start > len(left) + 1 and start + len(middle) < columns - len(right) - 1:
        line = line[:start] + middle + line[start + len(middle) :]
    return line


class _Raster:
    """Dots that lines are drawn on; y runs from 0 at the top to 1 at the bottom."""

    def __init__(self, width: int, height: int) -> None:
        self._width, self._height = width, height
        self._dots: set[tuple[int, int]] = set()

    def line(self, x0: int, y0: float, x1: int, y1: float) -> None:
        top, bottom = y0 * (self._height - 1), y1 * (self._height - 1)
        steps = max(abs(x1 - x0), math.ceil(abs(bottom - top)), 1)
        for step in range(steps + 1):
            share = step / steps
            self._dots.add((round(x0 + (x1 - x0) * share), round(top + (bottom - top) * share)))

    def braille(self, columns: int) -> list[str]:
        cells = [[0] * columns for _ in range(self._height // 4)]
        for x, y in self._dots:
            cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
        return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in cells]

    def stars(self) -> list[str]:
        return ["".join("*" if (x, y) in self._dots else " " for x in range(self._width)) for y in range(self._height)]
