"""Tests that a weighted mixture has exact proportions at every prefix, depends on seed and step alone, and goes on from any
step."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from fuyou_cli.core.errors import UsageError
from fuyou_cli.data.rows import Rows
from fuyou_cli.data.sampler import Mixture, Sampler

weights = some.lists(
    some.one_of(some.floats(0.001, 1000), some.sampled_from([0.1, 0.3, 1.0, 7.0, 1e-9, 3e5])), min_size=2, max_size=9
)
entries = some.lists(some.tuples(some.integers(1, 9), some.sampled_from([0.1, 0.25, 1, 2.5, 7])), min_size=2, max_size=5)


@given(weights=weights)
def test_proportions_are_within_one_row_at_any_prefix(weights: list[float]) -> None:
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    given = [0] * len(weights)
    for length, entry in enumerate(Mixture(weights).picks(0, 400)[1], start=1):
        given[entry] += 1
        assert all(abs(count - share * length) < 1 for count, share in zip(given, shares, strict=True))


@given(weights=weights, begin=some.integers(0, 500), jumps=some.lists(some.integers(0, 500), max_size=3))
def test_a_position_alone_equals_the_iteration(weights: list[float], begin: int, jumps: list[int]) -> None:
    iterated = Mixture(weights).picks(0, 520)[1]
    jumping = Mixture(weights)
    for position in [*jumps, begin]:
        counts, picks = jumping.picks(position, 20)
        assert counts == [iterated[:position].count(entry) for entry in range(len(weights))]
        assert picks == iterated[position : position + 20]


def test_a_position_far_away_is_reached_at_once() -> None:
    """Reaches half of 10**15 positions at once: the order repeats, so nothing is replayed."""
    assert Mixture([0.7, 0.3]).picks(10**15, 10)[0] == [7 * 10**14, 3 * 10**14]


def sampler_of(entries: list[tuple[int, float]], batch_size: int, seed: int) -> Sampler:
    sizes, weights = zip(*entries, strict=True)
    return Sampler(sum(sizes), batch_size=batch_size, shuffle=True, seed=seed, entry_rows=sizes, weights=weights)


@given(entries=entries, batch_size=some.integers(1, 12), seed=some.integers(0, 2**63), stops=some.sets(some.integers(0, 30)))
def test_a_run_that_stops_anywhere_sees_the_same_batches(
    entries: list[tuple[int, float]], batch_size: int, seed: int, stops: set[int]
) -> None:
    whole = sampler_of(entries, batch_size, seed)
    expected = [whole.batch(step) for step in range(31)]
    stopped = sampler_of(entries, batch_size, seed)
    for step in range(31):
        if step in stops:
            stopped = sampler_of(entries, batch_size, seed)
        assert stopped.batch(step) == expected[step]


@given(entries=entries, batch_size=some.integers(1, 12), seed=some.integers(0, 2**63))
def test_every_entry_is_seen_row_by_row_and_epoch_by_epoch(
    entries: list[tuple[int, float]], batch_size: int, seed: int
) -> None:
    sampler = sampler_of(entries, batch_size, seed)
    stream = [row for step in range(40) for row in sampler.batch(step)]
    firsts = accumulate((rows for rows, _ in entries), initial=0)
    for (rows, _), first in zip(entries, firsts, strict=False):
        own = [row for row in stream if first <= row < first + rows]
        for begin in range(0, len(own) - rows + 1, rows):
            assert sorted(own[begin : begin + rows]) == list(range(first, first + rows))


def test_entries_of_one_size_have_orders_of_their_own() -> None:
    rows = [row for step in range(2) for row in sampler_of([(50, 1), (50, 1)], 50, 7).batch(step)]
    assert [row for row in rows if row < 50] != [row - 50 for row in rows if row >= 50]


def test_what_is_no_mixture_is_refused() -> None:
    with pytest.raises(ValueError, match="do not make a mixture"):
        Sampler(3, batch_size=1, shuffle=False, seed=0, entry_rows=[1, 1], weights=[1, 1])
    with pytest.raises(ValueError, match="do not make a mixture"):
        Sampler(3, batch_size=1, shuffle=False, seed=0, entry_rows=[0, 3], weights=[1, 1])


def test_no_packed_row_has_texts_of_two_entries(
    write: Callable[..., Path], tokenise: Callable[..., Rows], tokenizer: Any
) -> None:
    one = write("one.jsonl", [{"text": "flour " * 9}] * 3)
    two = write("two.jsonl", [{"prompt": "ferry? ", "completion": "noon " * 5}] * 4)
    rows = tokenise(one, two, apart=True, packing="concat", max_seq_len=32)
    said = [str(tokenizer.decode(rows.tokens(number).tolist())) for number in range(len(rows))]
    first, second = rows.summary.entry_rows
    assert first + second == len(rows) and first > 1 and second > 1
    assert all("noon" not in text for text in said[:first]) and all("flour" not in text for text in said[first:])
    assert [name for _, name in rows.summary.formats] == ["text", "prompt_completion"]
    together = tokenise(one, packing="concat", max_seq_len=32)
    assert together.summary.entry_rows == (first,)


def test_an_entry_without_rows_is_refused(write: Callable[..., Path], tokenise: Callable[..., Rows]) -> None:
    full, empty = write("full.jsonl", [{"text": "a b"}]), write("empty.jsonl", [{"text": "apples " * 99}])
    with pytest.raises(UsageError, match=r"empty.jsonl: no token of this entry of the mixture carries loss"):
        tokenise(full, empty, apart=True, overlong="drop", max_seq_len=16)
