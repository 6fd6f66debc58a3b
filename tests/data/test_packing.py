"""Tests that rows are cut from samples without inventing or losing a token, except where the recipe says so and counts show it.
Hypothesis draws samples of random length and mask."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from fuyou_cli.core.errors import UsageError
from fuyou_cli.data.rows import BEGINS, LABEL, OPEN_ROWS, Counts, Row, Sample, concat, has_loss, isolated, pack


@some.composite
def sample(draw: some.DrawFn) -> Sample:
    size = draw(some.integers(0, 40))
    tokens = draw(some.lists(some.integers(0, 2**31 - 1), min_size=size, max_size=size))
    mask = draw(some.lists(some.integers(0, 1), min_size=size, max_size=size))
    return Sample(tokens=np.array(tokens, np.int32), mask=np.array(mask, np.uint8), place="here")


samples_of = some.lists(sample(), max_size=20)
lengths = some.integers(2, 17)


def joined(rows: list[Row]) -> tuple[list[int], list[int]]:
    return [int(t) for tokens, _ in rows for t in tokens], [int(m) for _, mask in rows for m in mask]


@given(samples=samples_of, max_seq_len=lengths)
def test_concat_conserves_tokens_and_mask(samples: list[Sample], max_seq_len: int) -> None:
    rows = list(concat(samples, max_seq_len=max_seq_len, counts=Counts()))
    assert joined(rows) == joined([(s.tokens, s.mask) for s in samples])
    assert all(len(tokens) == max_seq_len for tokens, _ in rows[:-1])
    assert all(1 <= len(tokens) == len(mask) <= max_seq_len for tokens, mask in rows)


@given(samples=samples_of, max_seq_len=lengths)
def test_concat_counts_the_samples_that_rows_cut(samples: list[Sample], max_seq_len: int) -> None:
    counts = Counts()
    list(concat(samples, max_seq_len=max_seq_len, counts=counts))
    ends = np.cumsum([0, *[len(s.tokens) for s in samples]]).tolist()
    crossing = [a // max_seq_len != (b - 1) // max_seq_len for a, b in pairwise(ends) if b > a]
    assert counts.split == sum(crossing)


@given(samples=samples_of, max_seq_len=lengths, packing=some.sampled_from([False, "concat"]))
def test_split_loses_no_label_but_those_that_begin_rows(samples: list[Sample], max_seq_len: int, packing: str | bool) -> None:
    counts = Counts()
    rows = list(pack(samples, packing=packing, overlong="split", max_seq_len=max_seq_len, counts=counts))
    assert all(has_loss(mask) for _, mask in rows)
    assert counts.samples == len(samples) and counts.truncated == counts.dropped == 0
    kept = sum(int(mask.sum()) for _, mask in rows)
    whole = sum(int(s.mask.sum()) for s in samples)
    # A row is left out only when no label of it counts: at most its first token's mark is lost with it.
    assert whole - counts.without_loss <= kept <= whole


def three() -> list[Sample]:
    return [Sample(tokens=np.arange(n, dtype=np.int32), mask=np.ones(n, np.uint8), place=f"f:{n}") for n in (3, 10, 4)]


@pytest.mark.parametrize(
    ("overlong", "lengths", "truncated", "dropped", "split"),
    [("truncate", [3, 4, 4], 1, 0, 0), ("drop", [3, 4], 0, 1, 0), ("split", [3, 4, 4, 2, 4], 0, 0, 1)],
)
def test_overlong_samples(overlong: str, lengths: list[int], truncated: int, dropped: int, split: int) -> None:
    counts = Counts()
    rows = list(pack(three(), packing=False, overlong=overlong, max_seq_len=4, counts=counts))
    assert [len(tokens) for tokens, _ in rows] == lengths
    assert (counts.samples, counts.truncated, counts.dropped, counts.split) == (3, truncated, dropped, split)


@pytest.mark.parametrize("packing", [False, "concat"])
def test_overlong_error_names_the_place(packing: str | bool) -> None:
    with pytest.raises(UsageError, match=r"f:10: 10 tokens, more than dataset.max_seq_len \(4\)"):
        list(pack(three(), packing=packing, overlong="error", max_seq_len=4, counts=Counts()))


def test_packing_with_drop_leaves_long_samples_out() -> None:
    counts = Counts()
    rows = list(pack(three(), packing="concat", overlong="drop", max_seq_len=4, counts=counts))
    assert joined(rows)[0] == [0, 1, 2, 0, 1, 2, 3]
    assert counts.dropped == 1


def test_rows_without_a_label_are_left_out_and_counted() -> None:
    masks = [[0, 0, 0], [1, 0, 0], [0, 0, 1]]  # the mark on a first token is no label
    samples = [Sample(tokens=np.zeros(3, np.int32), mask=np.array(m, np.uint8), place="") for m in masks]
    counts = Counts()
    rows = list(pack(samples, packing=False, overlong="truncate", max_seq_len=8, counts=counts))
    assert [mask.tolist() for _, mask in rows] == [[0, 0, 1]]
    assert counts.without_loss == 2


def test_isolated_keeps_documents_whole_and_marks_where_they_begin() -> None:
    documents = [(np.full(size, size, np.int32), np.ones(size, np.uint8)) for size in (5, 6, 3, 2, 8)]
    rows = [(tokens.tolist(), mask.tolist()) for tokens, mask in isolated(documents, max_seq_len=8)]
    first, rest = BEGINS, LABEL
    assert rows == [
        ([5] * 5 + [3] * 3, [first, *[rest] * 4, first, *[rest] * 2]),
        ([6] * 6 + [2] * 2, [first, *[rest] * 5, first, rest]),
        ([8] * 8, [first, *[rest] * 7]),
    ]


@given(samples=some.lists(sample(), max_size=80), max_seq_len=some.integers(2, 30))
def test_isolated_conserves_documents_with_loss(samples: list[Sample], max_seq_len: int) -> None:
    """Gives the same documents and labels as rows of their own do, but for the order."""
    alone = list(pack(samples, packing=False, overlong="split", max_seq_len=max_seq_len, counts=(ours := Counts())))
    rows = list(pack(samples, packing="isolated", overlong="split", max_seq_len=max_seq_len, counts=(theirs := Counts())))
    assert ours == theirs
    assert all(len(tokens) <= max_seq_len and mask[0] == BEGINS for tokens, mask in rows)
    documents = [
        (tokens.tolist(), (mask & LABEL).tolist())
        for row in rows
        for tokens, mask in zip(*(np.split(part, np.flatnonzero(row[1] & BEGINS)[1:]) for part in row), strict=True)
    ]
    assert sorted(documents) == sorted((tokens.tolist(), [0, *mask[1:].tolist()]) for tokens, mask in alone)
    assert len(rows) <= len(alone)


def test_isolated_fills_a_bounded_number_of_rows() -> None:
    """Opens more rows than that only at the end; a row with room for no document so far is done when another is begun."""
    documents = [(np.zeros(5, np.int32), np.ones(5, np.uint8))] * (OPEN_ROWS + 3)
    taken = 0

    def counted():
        nonlocal taken
        for document in documents:
            taken += 1
            yield document

    next(isolated(counted(), max_seq_len=8))
    assert taken == OPEN_ROWS + 1
