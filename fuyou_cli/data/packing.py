"""Packs tokenised samples into rows of at most `max_seq_len` tokens. Pure functions: arrays in, arrays and counts out.

A sample is (tokens int32 [n], mask uint8 [n]); LABEL in a mask means that the token is a label. Nothing predicts the first
token of a row, so its mask never counts. Where documents are kept apart, BEGINS marks the first token of each; it is no label.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fuyou_cli.core.errors import UsageError

Mask = NDArray[np.uint8]
Row = tuple[NDArray[np.int32], Mask]

LABEL, BEGINS = 1, 2  # bits of a mask
OPEN_ROWS = 32  # rows that `isolated` fills at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One tokenised sample. `place` says where it came from. `ends` is False for all but the last piece of a document."""

    tokens: NDArray[np.int32]
    mask: Mask
    place: str
    ends: bool = True


@dataclass(kw_only=True, slots=True)
class Counts:
    """Counts what happened to the samples while the rows are made. Always shown."""

    samples: int = 0
    truncated: int = 0  # cut at max_seq_len, the rest lost
    dropped: int = 0  # left out: too long
    split: int = 0  # spread over several rows, nothing lost
    without_loss: int = 0  # rows left out: no label carries loss
    run_together: int = 0  # pairs without white space between prompt and completion
    unanswered: int = 0  # samples with an answer of no text
    special: int = 0  # samples with a special token's name in their text
    special_example: str = ""  # where the first of them is, and its token
    lost: int = 0  # tokens of samples that were truncated or dropped
    longest: int = 0  # tokens of the longest sample, whole
    noted: dict[str, int] = field(default_factory=dict)  # samples by kind: those of `rows.NOTES`, and how masks were found
    noted_at: dict[str, str] = field(default_factory=dict)  # the first of them
    lengths: list[int] = field(default_factory=list)  # samples of at most 1, 2, 4, 8, ... tokens, beyond those before

    def note(self, kind: str, place: str) -> None:
        """Counts a sample of this kind."""
        self.noted[kind] = self.noted.get(kind, 0) + 1
        self.noted_at.setdefault(kind, place)

    def sample(self, size: int) -> None:
        """Counts a whole sample of `size` tokens."""
        self.samples += 1
        self.longest = max(self.longest, size)
        place = max(size - 1, 0).bit_length()
        self.lengths += [0] * (place + 1 - len(self.lengths))
        self.lengths[place] += 1


def has_loss(mask: Mask) -> bool:
    """Whether any label of the row counts."""
    return bool((mask[1:] & LABEL).any())


def lay_out(
    samples: Iterable[Sample], *, packing: str | bool, overlong: str, max_seq_len: int, counts: Counts
) -> Iterator[Row]:
    """Yields rows in the order of the samples. Rows without a label that counts are left out and counted.

    With `packing: concat` truncate and split are the same: the stream is cut at row ends and nothing is lost. With `isolated` a
    document without a label that counts is left out, and rows are not in the order of the samples.
    """
    fitting = _fit(samples, packing=packing == "concat", overlong=overlong, max_seq_len=max_seq_len, counts=counts)
    if packing == "concat":
        yield from _learning(concat(fitting, max_seq_len=max_seq_len, counts=counts), counts)
        return
    separate = _learning(((sample.tokens, sample.mask) for sample in fitting), counts)
    yield from isolated(separate, max_seq_len=max_seq_len) if packing else separate


def _learning(rows: Iterable[Row], counts: Counts) -> Iterator[Row]:
    for tokens, mask in rows:
        if has_loss(mask):
            yield tokens, mask
        else:
            counts.without_loss += 1


def _fit(samples: Iterable[Sample], *, packing: bool, overlong: str, max_seq_len: int, counts: Counts) -> Iterator[Sample]:
    whole = 0  # tokens of the document so far
    for sample in samples:
        size = len(sample.tokens)
        whole += size
        if sample.ends:
            counts.sample(whole)
            whole = 0
        if size <= max_seq_len or (packing and overlong in ("truncate", "split")):
            yield sample
        elif overlong == "drop":
            counts.dropped += 1
            counts.lost += size
        elif overlong == "error":
            raise UsageError(
                f"{sample.place}: {size:,} tokens, more than dataset.max_seq_len ({max_seq_len:,})",
                hint="increase max_seq_len, or set dataset.overlong to truncate, drop or split",
            )
        else:
            counts.truncated += overlong == "truncate"
            counts.split += overlong == "split"
            counts.lost += size - max_seq_len if overlong == "truncate" else 0
            for begin in range(0, max_seq_len if overlong == "truncate" else size, max_seq_len):
                end = begin + max_seq_len
                yield Sample(tokens=sample.tokens[begin:end], mask=sample.mask[begin:end], place=sample.place)


def concat(samples: Iterable[Sample], *, max_seq_len: int, counts: Counts) -> Iterator[Row]:
    """Joins the samples into one stream and cuts it into rows of exactly `max_seq_len` tokens; the last may be shorter.

    At a cut the next row's first token loses its label: one label in max_seq_len.
    """
    tokens = np.empty(max_seq_len, np.int32)
    mask = np.empty(max_seq_len, np.uint8)
    filled = 0
    begun = cut = False  # the current document: has tokens in a row; was cut by the end of a row
    for sample in samples:
        taken = 0
        while taken < len(sample.tokens):
            if filled == max_seq_len:
                yield tokens.copy(), mask.copy()
                filled = 0
                cut |= begun
            step = min(max_seq_len - filled, len(sample.tokens) - taken)
            tokens[filled : filled + step] = sample.tokens[taken : taken + step]
            mask[filled : filled + step] = sample.mask[taken : taken + step]
            filled, taken, begun = filled + step, taken + step, True
        if sample.ends:
            counts.split += cut
            begun = cut = False
    if filled:
        yield tokens[:filled].copy(), mask[:filled].copy()


def isolated(documents: Iterable[Row], *, max_seq_len: int) -> Iterator[Row]:
    """Puts whole documents into rows of at most `max_seq_len` tokens, each into the fullest row with room for it.

    So many rows are filled at a time; if a document fits in none, the fullest is done.
    """
    filling: list[_Filling] = []
    for tokens, mask in documents:
        row = max((row for row in filling if row.size + len(tokens) <= max_seq_len), key=_size, default=None)
        if row is None:
            if len(filling) == OPEN_ROWS:
                yield _joined(filling.pop(filling.index(max(filling, key=_size))).documents)
            filling.append(row := _Filling())
        row.documents.append((tokens, mask))
        row.size += len(tokens)
    for row in filling:
        yield _joined(row.documents)


@dataclass(slots=True, eq=False)
class _Filling:
    """A row that has room left, and the tokens in it."""

    documents: list[Row] = field(default_factory=list)
    size: int = 0


def _size(row: _Filling) -> int:
    return row.size


def _joined(documents: list[Row]) -> Row:
    """Returns a row of these documents, with their beginnings marked."""
    tokens, mask = (np.concatenate(parts) for parts in zip(*documents, strict=True))
    ends = np.cumsum([len(part) for part, _ in documents])
    mask[[0, *ends[:-1]]] = BEGINS
    return tokens, mask
