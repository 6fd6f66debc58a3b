"""The learning rate of every step, by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from fuyou_cli.training.rates import LearningRate


def _rates(name: str, *, warmup: int = 4, total: int = 20, ratio: float = 0.1, **more: Any) -> list[float]:
    rate = LearningRate(name=name, peak=2.0, warmup_steps=warmup, total_steps=total, min_ratio=ratio, **more)
    return [rate.at(step) for step in range(1, total + 1)]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_warmup_is_linear_and_reaches_the_peak(name: str) -> None:
    assert _rates(name, decay_steps=4)[:4] == [0.5, 1.0, 1.5, 2.0]


def test_constant_stays() -> None:
    assert set(_rates("constant")[3:]) == {2.0}


def test_linear_falls_evenly_to_its_end() -> None:
    rates = _rates("linear")[3:]
    assert rates[-1] == pytest.approx(0.2)
    steps = [before - after for before, after in pairwise(rates)]
    assert steps == pytest.approx([1.8 / 16] * 16)


def test_cosine_is_halfway_in_the_middle() -> None:
    rates = _rates("cosine")
    assert rates[11] == pytest.approx(1.1)
    assert rates[-1] == pytest.approx(0.2)
    assert all(before > after for before, after in pairwise(rates[3:]))


def test_wsd_stays_then_falls() -> None:
    rates = _rates("wsd", decay_steps=5)
    assert set(rates[3:15]) == {2.0}
    assert rates[15:] == pytest.approx([2.0 - 1.8 * part / 5 for part in range(1, 6)])


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_without_warmup_or_with_nothing_else(name: str) -> None:
    assert _rates(name, warmup=0, decay_steps=2)[0] > 1.8
    assert _rates(name, warmup=3, total=3, decay_steps=1)[:2] == pytest.approx([2 / 3, 4 / 3])
    assert _rates(name, warmup=0, total=1, decay_steps=1)[0] > 0
