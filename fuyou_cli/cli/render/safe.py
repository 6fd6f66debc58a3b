"""Makes a Rich console on which text cannot control the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Span, Text

from fuyou_cli.core.printable import printable


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
