"""One step on the terminal: which resource was busy when."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from fuyou_cli.core.units import duration
from fuyou_cli.training.busy import merged, phases
from fuyou_cli.training.report import Busy

from .theme import RESOURCE_STYLE, Symbols, heading, ordered, percent, show, symbols


def show_timeline(console: Console, busy: Sequence[Busy], *, stalls: dict[str, float] | None = None) -> None:
    """Rows are resources, columns time, darkness the busy share of that moment. Nothing without intervals."""
    if not busy:
        return
    shapes = symbols(console)
    end = max(item.end for item in busy)
    names = ordered(list(dict.fromkeys(item.resource for item in busy)))
    gutter = max(map(len, names))
    columns = console.width - 2 - gutter - 3 - 6  # indent, name, two edges, percent
    if columns < 8 or end <= 0:
        return
    edge = "│" if shapes.utf8 else "|"
    heading(console, "One step", f"{duration(end)}; darker is busier")
    marks = _phase_row(phases(busy), end, columns, shapes)
    if marks:
        show(console, Text(f"{'':{gutter}}  {marks}", style="dim"), indent=2)
    for name in names:
        spans = merged([item for item in busy if item.resource == name])
        line = Text(f"{name:{gutter}} {edge}")
        line.append(shaded(spans, end, columns, shapes), style=RESOURCE_STYLE.get(name, ""))
        line.append(f"{edge} {percent(sum(b - a for a, b in spans), end):>4}")
        show(console, line, indent=2)
    show(console, Text(" " * (gutter + 2) + _seconds_axis(end, columns), style="dim"), indent=2)
    if stalls:
        show(console, Text(waiting(stalls), overflow="fold"), indent=2)


def waiting(stalls: dict[str, float]) -> str:
    """ "compute waited 3.1 s for ssd read, 400 ms for update", longest first."""
    named = sorted(((seconds, cause) for cause, seconds in stalls.items() if worth_saying(seconds)), reverse=True)
    if not named:
        return "compute never waited"
    return "compute waited " + ", ".join(f"{duration(seconds)} for {cause}" for seconds, cause in named)


def worth_saying(seconds: float) -> bool:
    """Whether a wait is shown as more than "0 ms"."""
    return round(seconds * 1000) >= 1


def shaded(spans: Sequence[tuple[float, float]], end: float, columns: int, shapes: Symbols) -> str:
    """One character per column: how much of that stretch of time the spans cover."""
    share = [0.0] * columns
    step = end / columns
    for begin, finish in spans:
        for column in range(max(int(begin / step), 0), min(int(finish / step) + 1, columns)):
            share[column] += max(min(finish, (column + 1) * step) - max(begin, column * step), 0.0) / step
    top = len(shapes.shades) - 1
    return "".join(shapes.shades[0 if part < 0.005 else min(max(round(part * top), 1), top)] for part in share)


def _phase_row(found: Sequence[tuple[str, float, float]], end: float, columns: int, shapes: Symbols) -> str:
    """The names of the phases over where they begin, joined by rules to where they end."""
    row = [" "] * columns
    for name, begin, finish in found:
        first, last = int(begin / end * columns), min(int(finish / end * columns), columns)
        text = f"{name} ".ljust(last - first, shapes.rule)[: max(last - first - 1, 0)]
        row[first : first + len(text)] = text
    return "".join(row).rstrip()


def _seconds_axis(end: float, columns: int) -> str:
    """Times at the left, middle and right edge."""
    middle, last = duration(end / 2), duration(end)
    line = "0" + " " * (columns - 1 - len(last)) + last
    start = columns // 2 - len(middle) // 2
    return line[:start] + middle + line[start + len(middle) :] if start > 2 and columns > 3 * len(last) else line
