"""Says how many examples a property draws, what it is excused from, and how many cases of a test are quick."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

EVERY = int(os.environ.get("FUYOU_EXAMPLES", "0"))  # of every property, whatever it asks for; 0: as many as it asks for
USUAL = 50
_SLOW = [HealthCheck.too_slow]  # says more of the machine than of the property
_SHARING = [*_SLOW, HealthCheck.function_scoped_fixture]


def load_profile() -> None:
    """Loads what holds for every property that says nothing else."""
    settings.register_profile("fuyou", max_examples=EVERY or USUAL, deadline=None, suppress_health_check=_SLOW, print_blob=True)
    settings.load_profile("fuyou")


def examples(count: int = USUAL, *, share_fixtures: bool = False) -> settings:
    """Draws so many instead of the usual number. `share_fixtures`: one folder, say, does for all examples of a property."""
    check = _SHARING if share_fixtures else _SLOW
    return settings(max_examples=EVERY or count, suppress_health_check=check)


def every(count: int, cases: Iterable[Any]) -> list[Any]:
    """Leaves each `count`th case in the quick suite, the first among them. The others are marked slow."""
    return quick_and_slow(cases, lambda number: number % count == 0)


def quick_and_slow(cases: Iterable[Any], is_quick: Callable[[int], bool]) -> list[Any]:
    """Marks cases slow whose number is not quick."""
    listed = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=[] if is_quick(n) else [pytest.mark.slow]) for n, case in enumerate(listed)]


def crossed(count: int, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Tests all combinations of the axes' values, one in `count` of them in the quick suite: along diagonals, so that every
    value of an axis is among them."""
    numbered = [list(enumerate(values)) for values in axes.values()]
    places = [[at for at, _ in chosen] for chosen in product(*numbered)]
    cases = [tuple(value for _, value in chosen) for chosen in product(*numbered)]
    quick = zip(*(at for at in places if sum(at) % count == 0), strict=True)
    assert [len({*found}) for found in quick] == [*map(len, numbered)], "a value is in slow cases alone: take a smaller count"
    return pytest.mark.parametrize(tuple(axes), quick_and_slow(cases, lambda number: sum(places[number]) % count == 0))
