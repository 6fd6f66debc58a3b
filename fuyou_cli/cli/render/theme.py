"""Draws symbols, bars and tables for all views, on consoles that text cannot control.

A console that cannot encode UTF-8 gets plain ASCII everywhere. Colour only repeats what the text already says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rich.box import Box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Span, Text

from fuyou_cli.core.json_files import one_line, printable
from fuyou_cli.core.units import gb, gib
from fuyou_cli.spec.hardware import HardwareProfile

RESOURCES = ("compute", "update", "ssd read", "ssd write", "h2d", "d2h", "dram")  # top to bottom, in every view

RESOURCE_STYLE = {
    "compute": "blue",
    "update": "magenta",
    "ssd read": "green",
    "ssd write": "yellow",
    "h2d": "cyan",
    "d2h": "bright_cyan",
    "dram": "red",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Symbols:
    """The characters of one console."""

    utf8: bool
    none: str
    rule: str
    times: str
    arrow: str
    dot: str  # between items of a list
    bars: str  # growing parts of one cell, the last one full
    levels: str  # of a cell filled from below, empty to full
    shades: str  # from idle to busy
    newline: str
    mark: str  # under trained text


_UNICODE = Symbols(
    utf8=True, none="·", rule="─", times="×", arrow="→", dot="·", bars="▏▎▍▌▋▊▉█", levels=" ▁▂▃▄▅▆▇█", shades=" ░▒▓█",
    newline="↵", mark="▔",
)  # fmt: skip
_ASCII = Symbols(
    utf8=False, none="-", rule="-", times="x", arrow="->", dot="|", bars="#", levels=" .#", shades=" .:=#",
    newline="\\n", mark="^",
)  # fmt: skip
_RULED = "    \n    \n{0}\n    \n{0}\n{0}\n    \n    \n"


class SafeConsole(Console):
    """Spells out control, bidirectional and invisible characters of all text that it draws; Rich itself drops only five."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Makes text safe before it is wrapped: cells of tables and lines of a live block pass here too."""
        return super().render(safe(renderable) if isinstance(renderable, Text) else renderable, options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Makes plain strings safe that are printed without becoming a Text first."""
        return super().render_str(printable(text), **options)


def safe(text: Text) -> Text:
    """Returns the text itself if it is safe, else a copy whose styles still cover the same letters."""
    if text.plain.isprintable() or printable(text.plain) == text.plain:
        return text
    spelt = [printable(letter) for letter in text.plain]
    at = [0, *accumulate(map(len, spelt))]  # new position of each letter
    copy = text.blank_copy("".join(spelt))
    last = len(spelt)
    copy.spans = [Span(at[min(span.start, last)], at[min(span.end, last)], span.style) for span in text.spans]
    return copy


def symbols(console: Console) -> Symbols:
    """Returns Unicode symbols if the console can encode them, else ASCII."""
    return _UNICODE if console.encoding.lower().startswith("utf") else _ASCII


def show(console: Console, content: RenderableType, *, indent: int = 0) -> None:
    """Prints indented, without trailing blanks. Characters that the console cannot encode become question marks."""
    options = console.options.update(width=max(console.width - indent, 8), highlight=False)
    for line in console.render_lines(content, options, pad=False):
        segments = [segment for segment in line if not segment.is_control]
        while segments and not segments[-1].text.strip():
            segments.pop()
        if segments:
            text, style, control = segments[-1]
            segments[-1] = Segment(text.rstrip(), style, control)
            segments.insert(0, Segment(" " * indent))
        encoded = [Segment(encodable(segment.text, console), segment.style) for segment in segments]
        console.print(Segments([*encoded, Segment.line()]), end="", highlight=False)


def encodable(text: str, console: Console) -> str:
    """Replaces characters that the console cannot encode by question marks."""
    return text.encode(console.encoding, "replace").decode(console.encoding)


def say(console: Console, line: str | Text = "", *, style: str = "", indent: int = 0) -> None:
    """Prints one paragraph without markup, highlighting or emoji codes: the text may come from a file."""
    text = Text(one_line(line)) if isinstance(line, str) else line.copy()
    text.overflow = "fold"
    if style:
        text.stylize_before(style)
    show(console, text, indent=indent)


def heading(console: Console, title: str, note: str = "") -> None:
    """Prints a blank line, then the title of a section, followed by a dim note."""
    console.print()
    line = Text(title, style="bold")
    if note:
        line.append(f"  {note}", style="not bold dim")
    say(console, line)


def bar(share: float, width: int, shapes: Symbols) -> str:
    """Draws `share` of `width` cells, at least a trace if it is not zero."""
    share = min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0
    steps = len(shapes.bars)
    filled = math.ceil(share * width * steps) if share > 0 else 0
    whole, part = divmod(filled, steps)
    return shapes.bars[-1] * whole + (shapes.bars[part - 1] if part else "")


def ruled(shapes: Symbols, *titles: str, names: int = 1) -> Table:
    """Makes a table with a rule under its header and between sections, and no frame: `names` columns on the left, the last of
    which wraps, and figures on the right."""
    box = Box(_RULED.format(shapes.rule * 4), ascii=not shapes.utf8)
    content = Table(box=box, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", border_style="dim")
    for number, title in enumerate(titles):
        column(content, title, right=number >= names, wrap=number == names - 1)
    return content


def column(content: Table, title: str = "", *, right: bool = False, wrap: bool = False, style: str = "") -> None:
    """Adds a column that cuts long text without an ellipsis, which ASCII lacks."""
    content.add_column(
        title, justify="right" if right else "left", no_wrap=not wrap, overflow="fold" if wrap else "crop", style=style
    )


def pairs(console: Console, rows: Sequence[tuple[str, str]], *, indent: int = 2) -> None:
    """Prints name and text side by side; the text wraps under itself."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    column(grid, style="dim")
    column(grid, wrap=True)
    for name, value in rows:
        grid.add_row(Text(name), Text(one_line(value)))
    show(console, grid, indent=indent)


def machine_in_words(hardware: HardwareProfile, *, ranks: int = 1) -> list[str]:
    """Names the device, cores, RAM and disk of a machine, or of the part that each of several ranks has."""
    memory = f" {gib(hardware.device_memory)}" if hardware.device_memory else ""
    if ranks > 1:
        return [
            f"each of {ranks} ranks: {hardware.device} ({hardware.device_name}){memory}",
            some(hardware.cores, "core"),
            f"{gib(hardware.ram_available)} RAM available",
            f"{gb(hardware.disk_free)} of disk free",
        ]
    return [
        f"{hardware.device} ({hardware.device_name}){memory}",
        f"{hardware.cores} cores",
        f"{gib(hardware.ram_total)} RAM, {gib(hardware.ram_available)} available",
        f"{gb(hardware.disk_free)} of disk free",
    ]


def some(number: int, what: str) -> str:
    """Formats a number of things: "1 step", "1,000 steps"."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def percent(part: float, whole: float) -> str:
    """Formats a share: "89%"; "?" if the whole is not known."""
    return f"{100 * part / whole:.0f}%" if whole > 0 else "?"


def rate(bytes_per_second: float) -> str:
    """Formats a rate: "2.1 GB/s", "84 MB/s"."""
    return f"{gb(bytes_per_second)}/s"


def speed(tokens_per_second: float) -> str:
    """Formats four digits, or all before the point: "258.7", "1,353", "16,832"."""
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 1000 else f"{tokens_per_second:,.4g}"


def tera(flops: float) -> str:
    """Formats TFLOP with three digits, without the unit: "0.861", "49.2", "989"."""
    value = flops / 1e12
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:#.3g}" if value >= 0.001 else f"{value:.1e}"


def ordered(resources: Sequence[str]) -> list[str]:
    """Sorts the known resources into their usual order, then any others as given."""
    return [name for name in RESOURCES if name in resources] + [name for name in resources if name not in RESOURCES]
