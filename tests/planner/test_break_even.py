"""How the smallest batch that hides the store is looked for: few questions, and an answer that is near."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import pytest

from fuyou_cli.advice.break_even import HIDDEN, MOST_PLANS, fewest, hides_the_store, most_below
from fuyou_cli.planner.search import fastest
from fuyou_cli.spec.hardware import BURST_RATES, SUSTAINED_RATES

from .models import HARDWARE
from .test_plan_file import SPEC, wishes

Found = TypeVar("Found")
KINDS = ("weights", "states", "gradients", "boundaries")
SLOW_ADAMW = replace(HARDWARE, adamw=((1, 1e7),))


class Asked:
    """Counts above `limit` are hidden (`hidden_above`) or those up to it are; those beyond `most` do not fit."""

    def __init__(self, limit: int, *, hidden_above: bool = True, most: int = 1 << 60) -> None:
        self.limit, self.hidden_above, self.most = limit, hidden_above, most
        self.counts: list[int] = []

    def __call__(self, count: int) -> bool | None:
        self.counts.append(count)
        return None if count > self.most else (count > self.limit) == self.hidden_above


def alike(look: Callable[[int], tuple[Found, list[int]]], least: int, greatest: int) -> Iterator[tuple[int, int, Found, int]]:
    """All limits from `least` to `greatest`, in ranges with one answer: up to the next count that is asked for a limit makes
    no difference. Each range's first and last limit, what `look` finds there, and how often it asked."""
    while least <= greatest:
        found, counts = look(least)
        last = min(greatest, min((count - 1 for count in counts if count > least), default=greatest))
        yield least, last, found, len(counts)
        least = last + 1


@pytest.mark.parametrize("begin", [1, 1025])
def test_the_answer_hides_the_store_and_is_not_far_above_what_does(begin: int) -> None:
    """Of every batch up to 2,048 and every threshold."""

    def look(limit: int) -> tuple[tuple[int | None, int, bool], list[int]]:
        asked = Asked(limit)
        found = fewest(asked, now, hidden_now=now > limit)
        assert len(asked.counts) <= MOST_PLANS
        return found, [now, *asked.counts]

    for now in range(begin, begin + 1024):
        for first, last, (found, tried, limited), _ in alike(look, 0, 256 * now):
            assert not limited
            if found is None:
                assert first + 1 > tried >= 64 * now  # seven doublings, each planned
                continue
            assert found >= last + 1
            nearest = max(first + 1, now // 16)  # far from the recipe's batch fewer questions are left
            if nearest <= min(last + 1, 32 * now):
                assert found - nearest <= max(1, 0.2 * found)


@pytest.mark.parametrize("begin", [1, 1025])
def test_what_does_not_fit_is_the_end(begin: int) -> None:
    def look(most: int) -> tuple[tuple[int | None, int, bool], list[int]]:
        asked = Asked(most, most=most)
        return fewest(asked, now, hidden_now=False), asked.counts

    for now in range(begin, begin + 1024):
        for first, last, (found, tried, limited), times in alike(look, now, 256 * now):
            assert found is None and tried <= first and times <= MOST_PLANS
            near = min(last, 16 * now)  # near the recipe's batch it is known well
            if not limited:
                assert tried == 128 * now
            elif first <= near:
                assert near - tried <= max(1, 0.1 * near)


@pytest.mark.parametrize("begin", [2, 2050])
def test_smaller_batches_may_hide_what_larger_ones_do_not(begin: int) -> None:
    """What they keep is not on the ssd then."""

    def look(limit: int) -> tuple[int | None, list[int]]:
        asked = Asked(limit, hidden_above=False)
        return most_below(asked, now), asked.counts

    for now in range(begin, begin + 2048):
        for first, last, found, times in alike(look, 0, now - 1):
            assert times <= MOST_PLANS
            if found is None:
                assert first == last == 0 or 16 * last < now
                continue
            assert 0 < found <= first
            if 4 * last >= now:
                assert last - found <= max(1, 0.1 * last)


def test_waiting_for_adamw_is_not_the_stores_doing() -> None:
    """With clipping every update comes before its own forward: compute waits for it, wherever its states are."""
    at_home = fastest(
        SPEC, SLOW_ADAMW, wishes(weights="cpu", states="cpu", gradients="cpu", boundaries="cpu", clip_grad_norm=1.0)
    )
    on_ssd = fastest(SPEC, SLOW_ADAMW, wishes(weights="ssd", states="ssd", clip_grad_norm=1.0))
    for plan in (at_home, on_ssd):
        assert sum(plan.predicted.stalls.values()) > HIDDEN * plan.predicted.step_seconds
        assert hides_the_store(SPEC, SLOW_ADAMW, plan)
    assert at_home.predicted.read_per_step == at_home.predicted.written_per_step == 0
    slow_disk = replace(SLOW_ADAMW, adamw=HARDWARE.adamw, store_read=1e6, store_read_mixed=1e6)
    plan = fastest(SPEC, slow_disk, wishes(weights="ssd", states="ssd", clip_grad_norm=1.0))
    assert not hides_the_store(SPEC, slow_disk, plan)


@pytest.mark.parametrize("sustained", [False, True])
def test_drives_that_slow_down_are_waited_for_only_in_a_run_that_slows_them_down(sustained: bool) -> None:
    """Without the store nothing of it is left, also not the rates that it falls to."""
    fast_at_first = replace(HARDWARE, **dict.fromkeys(BURST_RATES, 1e15), **dict.fromkeys(SUSTAINED_RATES, 1e6))
    wanted = wishes(weights="ssd", states="ssd", clip_grad_norm=1.0, sustained=sustained)
    plan = fastest(SPEC, fast_at_first, wanted)
    assert plan.sustained == sustained and plan.predicted.written_per_step > 0
    assert hides_the_store(SPEC, fast_at_first, plan) == (not sustained)


def test_a_batch_that_is_just_enough() -> None:
    assert fewest(Asked(63), 64, hidden_now=True) == (64, 64, False)
    assert fewest(Asked(0), 64, hidden_now=True)[0] == 1
    assert fewest(Asked(64), 64, hidden_now=False)[0] in range(65, 70)
    assert most_below(Asked(25, hidden_above=False), 1095 + 25) in range(23, 26)


def test_what_does_not_fit_below_the_recipe_s_batch_is_not_asked_for_again() -> None:
    asked: list[int] = []

    def hidden(count: int) -> bool | None:
        asked.append(count)
        return None if count < 60 else True

    assert fewest(hidden, 100, hidden_now=True)[0] in range(60, 65)
    assert len(asked) == len(set(asked)) <= MOST_PLANS
