"""Make a Rich console on which text cannot drive the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Span, Text

from fuyou_cli.core.printable import printable


class SafeConsole(Console):
    """Spell out control, bidirectional and invisible characters of every text it draws; Rich itself drops only five."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Make every text safe before it is wrapped: cells of tables and lines of a live block pass here too."""
        return super().render(safe(renderable) if isinstance(renderable, Text) else renderable, options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Make safe what is printed without being made a Text first."""
        return super().render_str(printable(text), **options)


def safe(text: Text) -> Text:
    """Return the text as it is where that is safe, else a copy whose styles still cover what they did."""
    if text.plain.isprintable() or printable(text.plain) == text.plain:
        return text
    spelt = [printable(letter) for letter in text.plain]
    at = [0, *accumulate(map(len, spelt))]  # where each letter begins now
    copy = text.blank_copy("".join(spelt))
    last = len(spelt)
    copy.spans = [Span(at[min(span.start, last)], at[min(span.end, last)], span.style) for span in text.spans]
    return copy
