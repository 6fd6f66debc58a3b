"""Text that came from outside, made safe to print: control, bidirectional and invisible characters are spelt out.

A path, a name in a configuration or a value of a recipe may hold an escape sequence that retitles a terminal, or a mark that
turns the reading order around. Letters of every script are printed as they are.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with everything that is no visible character spelt as in Python (`\\x1b`, `\\u202e`). Line ends stay: messages
    may have several lines."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


def one_line(text: str) -> str:
    """The same of a name, which could end the line otherwise and forge the next one."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
