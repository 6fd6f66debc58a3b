"""Makes foreign text safe to print: spells out control, bidirectional and invisible characters.

A path, a name in a configuration or a value in a recipe may hold an escape sequence that changes the terminal's title, or a
mark that reverses the reading order. Letters of every script are printed as they are.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Spells every invisible character as Python does (`\\x1b`, `\\u202e`). Newlines stay."""
    return "\n".join(map(one_line, text.split("\n")))


def one_line(text: str) -> str:
    """Spells newlines too. A name with one could otherwise forge the next line."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
