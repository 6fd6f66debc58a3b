"""Tests places of the store that take turns: nothing is written over that a crash would go back to."""

from __future__ import annotations

from fuyou_cli.planner.ledgers import CommitLedger
from fuyou_cli.spec.plan import ExtentPair


def test_two_places_take_turns() -> None:
    pair = ExtentPair(offset=8, size=4)
    assert [pair.place(turn) for turn in range(5)] == [8, 12, 8, 12, 8]


def test_between_commits_updates_are_in_place() -> None:
    ledger = CommitLedger(every=3, base=4)
    turns = [0]
    for generation in range(4, 12):
        turns.append(ledger.next_turn(turns[-1], generation))
    assert turns == [0, 1, 1, 2, 2, 2, 3, 3, 3]  # 4 is the base, 6 and 9 are committed
    assert [ledger.is_written(generation) for generation in (5, 6, 7, 9)] == [False, True, False, True]
    ends = CommitLedger(every=None, base=0)
    assert [ends.next_turn(1, generation) for generation in (0, 1, 50)] == [2, 1, 1] and not ends.is_written(50)
