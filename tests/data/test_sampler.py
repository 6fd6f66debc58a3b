"""The sampler is a pure function of (rows, batch size, shuffle, seed, step). Hypothesis picks awkward sizes: batches
larger than the data, one row, sizes that do not divide."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as some

from fuyou_cli.data.sampler import Sampler

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


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Sampler(0, batch_size=1, shuffle=False, seed=0)
    with pytest.raises(ValueError, match="negative"):
        Sampler(3, batch_size=1, shuffle=False, seed=0).batch(-1)


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
