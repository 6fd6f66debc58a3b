"""core/process.py: the cycle collector stays off where it only takes time, and does not make up for it afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fuyou_cli.core.process import uncollected

MANY = 50_000  # more than any threshold


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Begins like a command: what these tests' process froze would keep `uncollected` from moving anything."""
    gc.unfreeze()
    gc.collect()
    yield
    gc.freeze()


def _collections() -> list[int]:
    return [generation["collections"] for generation in gc.get_stats()]


def test_what_was_made_meanwhile_is_not_looked_at_right_after() -> None:
    before = _collections()
    with uncollected():
        assert not gc.isenabled()
        made = [[number] for number in range(MANY)]
    made += [[number] for number in range(10)]
    assert _collections() == before
    assert gc.isenabled() and not gc.get_freeze_count()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
