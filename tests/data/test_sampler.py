"""The rows of a step are a pure function of the data, the seed and the step: the sampler alone, in mixtures (exact
proportions at every prefix), and with samples held back (`dataset.eval_fraction`: each is either trained on or held back)."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from fuyou_cli.core.errors import UsageError
from fuyou_cli.data.batches import DatasetMixture, HeldPart, Sampler
from fuyou_cli.data.rows import Rows

sizes = some.integers(1, 40)
seeds = some.integers(0, 2**63)


@given(rows=sizes, batch_size=sizes, shuffle=some.booleans(), seed=seeds)
def test_every_row_comes_exactly_once_per_epoch(rows: int, batch_size: int, shuffle: bool, seed: int) -> None:
    sampler = Sampler(rows, batch_size=batch_size, shuffle=shuffle, seed=seed)
    epochs = 3
    batches = [sampler.batch(step) for step in range(sampler.steps(epochs))]
    assert all(len(batch) == batch_size for batch in batches)
    stream = [row for batch in batches for row in batch]
    for epoch in range(epochs):
        assert sorted(stream[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


@given(rows=sizes, batch_size=sizes, seed=seeds, order=some.randoms())
def test_any_step_alone_equals_the_iteration(rows: int, batch_size: int, seed: int, order: object) -> None:
    iterated = Sampler(rows, batch_size=batch_size, shuffle=True, seed=seed)
    steps = list(range(12))
    expected = {step: iterated.batch(step) for step in steps}
    order.shuffle(steps)  # type: ignore[attr-defined]
    jumping = Sampler(rows, batch_size=batch_size, shuffle=True, seed=seed)
    for step in steps:
        assert jumping.batch(step) == expected[step]
        assert Sampler(rows, batch_size=batch_size, shuffle=True, seed=seed).batch(step) == expected[step]


def test_orders_differ_between_seeds_and_epochs() -> None:
    first = Sampler(1000, batch_size=1000, shuffle=True, seed=1)
    second = Sampler(1000, batch_size=1000, shuffle=True, seed=2)
    orders = {tuple(first.batch(0)), tuple(first.batch(1)), tuple(second.batch(0)), tuple(range(1000))}
    assert len(orders) == 4


def test_the_order_is_fixed_for_good() -> None:
    """Pins these numbers for good: a saved position is worth nothing when another numpy gives another order."""
    assert Sampler(8, batch_size=8, shuffle=True, seed=42).batch(0) == FIRST_ORDER
    assert Sampler(8, batch_size=8, shuffle=True, seed=42).batch(1) == SECOND_ORDER


def test_without_shuffle_the_order_is_the_data() -> None:
    sampler = Sampler(5, batch_size=2, shuffle=False, seed=7)
    assert [sampler.batch(step) for step in range(4)] == [[0, 1], [2, 3], [4, 0], [1, 2]]


def test_steps_count_whole_epochs() -> None:
    sampler = Sampler(10, batch_size=4, shuffle=False, seed=0)
    assert [sampler.steps(epochs) for epochs in (0.5, 1, 2, 2.05)] == [2, 3, 5, 6]
    assert sampler.epoch(5) == 2.0


@pytest.mark.parametrize(
    ("rows", "batch_size", "epochs", "facts"),
    [
        (10, 64, 1, "each row is seen about 6.4 times per step, and 1 step is 6.4 epochs, but train.epochs is 1"),
        (1, 6, 1, "each row is seen about 6 times per step, and 1 step is 6 epochs, but train.epochs is 1"),
        (10, 64, 32, "each row is seen about 6.4 times per step"),
        (10, 64, None, "each row is seen about 6.4 times per step"),
        (25, 10, 1, "3 steps are 1.2 epochs, but train.epochs is 1"),
        (100, 11, 1, None),  # 1.1 exactly
        (25, 10, 2, None),
        (25, 10, None, None),
        (64, 64, 1, None),
    ],
)
def test_rows_that_come_more_often_than_asked_are_noted(
    rows: int, batch_size: int, epochs: int | None, facts: str | None
) -> None:
    sampler = Sampler(rows, batch_size=batch_size, shuffle=True, seed=0)
    note = sampler.note(sampler.steps(epochs or 1), epochs)
    assert (note is None) == (facts is None)
    if note is not None:
        plural = "s" * (rows != 1)
        assert note == f"{rows} row{plural}, batches of {batch_size}: {facts} (use a smaller train.batch_size to come closer)"


FIRST_ORDER = [7, 1, 6, 4, 3, 5, 0, 2]
SECOND_ORDER = [4, 5, 3, 0, 2, 7, 1, 6]


@pytest.mark.parametrize("shuffle", [True, False])
def test_what_it_takes_is_what_it_says(shuffle: bool) -> None:
    sampler = Sampler(200_000, batch_size=4, shuffle=shuffle, seed=1)
    tracemalloc.start()
    try:
        for step in (0, 49_999, 50_000, 149_999):  # into the next epochs, where an order is there already
            sampler.batch(step)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 8 * sampler.rows <= peak <= sampler.peak_bytes


# ---- mixtures --------------------------------------------------------------------------------------------------------


weights = some.lists(
    some.one_of(some.floats(0.001, 1000), some.sampled_from([0.1, 0.3, 1.0, 7.0, 1e-9, 3e5])), min_size=2, max_size=9
)
entries = some.lists(some.tuples(some.integers(1, 9), some.sampled_from([0.1, 0.25, 1, 2.5, 7])), min_size=2, max_size=5)


@given(weights=weights)
def test_proportions_are_within_one_row_at_any_prefix(weights: list[float]) -> None:
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    given = [0] * len(weights)
    for length, entry in enumerate(DatasetMixture(weights).picks(0, 400)[1], start=1):
        given[entry] += 1
        assert all(abs(count - share * length) < 1 for count, share in zip(given, shares, strict=True))


@given(weights=weights, begin=some.integers(0, 500), jumps=some.lists(some.integers(0, 500), max_size=3))
def test_a_position_alone_equals_the_iteration(weights: list[float], begin: int, jumps: list[int]) -> None:
    iterated = DatasetMixture(weights).picks(0, 520)[1]
    jumping = DatasetMixture(weights)
    for position in [*jumps, begin]:
        counts, picks = jumping.picks(position, 20)
        assert counts == [iterated[:position].count(entry) for entry in range(len(weights))]
        assert picks == iterated[position : position + 20]


def test_a_position_far_away_is_reached_at_once() -> None:
    """Reaches half of 10**15 positions at once: the order repeats, so nothing is replayed."""
    assert DatasetMixture([0.7, 0.3]).picks(10**15, 10)[0] == [7 * 10**14, 3 * 10**14]


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


# ---- held back -------------------------------------------------------------------------------------------------------


TEXTS = [f"sample {number} of {number * 7} words" for number in range(40)]


@given(fraction=some.floats(0.001, 0.999), seed=some.integers(0, 2**63), entry=some.integers(0, 9))
def test_as_many_as_the_fraction_says_at_any_prefix(fraction: float, seed: int, entry: int) -> None:
    held = 0
    for number in range(300):
        held += HeldPart(fraction=fraction, seed=seed, held=True).takes(entry, number)
        assert abs(held - Fraction(str(fraction)) * (number + 1)) < 1


def test_another_seed_or_entry_holds_other_samples_back() -> None:
    def held(seed: int, entry: int) -> list[int]:
        return [number for number in range(1000) if HeldPart(fraction=0.05, seed=seed, held=True).takes(entry, number)]

    assert held(seed=1, entry=0) == held(seed=1, entry=0)
    assert len({tuple(held(seed=seed, entry=entry)) for seed in (1, 2) for entry in (0, 1)}) == 4


def part(*, held: bool, fraction: float = 0.2) -> dict[str, Any]:
    return asdict(HeldPart(fraction=fraction, seed=3, held=held))


@pytest.mark.parametrize("apart", [False, True], ids=["entries end to end", "a mixture"])
def test_every_sample_is_in_one_of_both(
    apart: bool, write: Callable[..., Path], tokenise: Callable[..., Rows], tokenizer: Any
) -> None:
    """The number of a sample counts over the files of its entry; packing and the most samples come after and before."""
    files = [write("one.jsonl", [{"text": text} for text in TEXTS[:25]]), write("two.jsonl", [{"text": t} for t in TEXTS[25:]])]
    held = tokenise(*files, apart=apart, part=part(held=True))
    rest = tokenise(*files, apart=apart, part=part(held=False), packing="concat")
    texts = [tokenizer.decode(held.tokens(row), skip_special_tokens=True) for row in range(len(held))]
    packed = "".join(tokenizer.decode(rest.tokens(row), skip_special_tokens=True) for row in range(len(rest)))
    assert texts == [text for text in TEXTS if text in texts] and len(texts) == len(TEXTS) // 5
    assert packed == "".join(text for text in TEXTS if text not in texts)
    if apart:
        assert held.summary.entry_rows == (5, 3)
    else:
        some = tokenise(*files, part=part(held=True), max_samples=20)
        assert [some.tokens(row).tolist() for row in range(len(some))] == [held.tokens(row).tolist() for row in range(4)]


@pytest.mark.parametrize(("fraction", "held", "said"), [(0.01, True, "holds none back"), (0.99, False, "leaves none to train")])
def test_a_part_without_samples_is_said(
    fraction: float, held: bool, said: str, write: Callable[..., Path], tokenise: Callable[..., Rows]
) -> None:
    file = write("few.jsonl", [{"text": TEXTS[0]}])
    with pytest.raises(UsageError, match=said):
        tokenise(file, part=part(held=held, fraction=fraction))
