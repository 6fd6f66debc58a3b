"""Defines `MicroBatch`: which part of a batch, or of a sweep's share of it, is computed at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

_Whole = TypeVar("_Whole")  # an array or a tensor (rows, tokens, ...)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Holds some rows of a whole batch. Only their first `width` tokens are computed: what follows pads them to other rows."""

    first: int
    end: int
    width: int
    longest: int  # tokens of its longest row, or document, without padding

    @property
    def rows(self) -> slice:
        return slice(self.first, self.end)

    @property
    def tokens(self) -> int:
        """Returns the tokens that are computed, with padding."""
        return (self.end - self.first) * self.width

    def of(self, whole: _Whole) -> _Whole:
        """Returns its part of a whole batch, as a view."""
        part: _Whole = whole[self.first : self.end, : self.width]  # type: ignore[index]
        return part

    def after(self, rows: int) -> MicroBatch:
        """Returns the same part, counted from a row that comes `rows` later."""
        return MicroBatch(first=self.first - rows, end=self.end - rows, width=self.width, longest=self.longest)


def whole_rows(rows: int, width: int) -> MicroBatch:
    """Returns the one micro-batch of rows that are computed at once."""
    return MicroBatch(first=0, end=rows, width=width, longest=width)


def even(rows: int, size: int, width: int) -> tuple[MicroBatch, ...]:
    """Divides whole rows of `width` tokens into micro-batches of `size` rows, in order."""
    firsts = range(0, rows, size)
    return tuple(MicroBatch(first=first, end=min(first + size, rows), width=width, longest=width) for first in firsts)


def rounded_up(tokens: int, step: int) -> int:
    """Returns the length that attention computes a document of `tokens` in: a multiple of `step`, of twice of it beyond eight
    steps, and so on. So there are few of them however long documents are. `step` 0: the length itself."""
    if not step:
        return tokens
    while tokens > 8 * step:
        step *= 2
    return -(-tokens // step) * step


def lengths_up_to(longest: int, step: int) -> int:
    """Returns how many lengths `rounded_up` can give for documents of at most so many tokens."""
    if not step:
        return longest
    return len({rounded_up(tokens, step) for tokens in range(1, longest + 1)})
