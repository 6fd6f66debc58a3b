"""Makes text that came from outside safe to print: control, bidirectional and invisible characters are spelt out.

A path, a name in a configuration or a value of a recipe may hold an escape sequence that retitles a terminal, or a mark that
turns the reading order around. Letters of every script are printed as they are.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Spells everything that is no visible character as Python does (`\\x1b`, `\\u202e`). Line ends stay."""
    return "\n".join(map(one_line, text.split("\n")))


def one_line(text: str) -> str:
    """Spells line ends too, of a name, which could otherwise forge the next line."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
