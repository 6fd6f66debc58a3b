"""How the smallest batch that hides the store is looked for: few questions, and an answer that is near."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.cli.break_even import HIDDEN, MOST_PLANS, fewest, hides_the_store, most_below
from fuyou_cli.planner.search import fastest
from fuyou_cli.spec.hardware import BURST_RATES, SUSTAINED_RATES

from .models import HARDWARE
from .test_plan_file import SPEC, wishes

KINDS = ("weights", "states", "gradients", "boundaries")
SLOW_ADAMW = replace(HARDWARE, adamw=((1, 1e7),))


class Asked:
    """Counts from `threshold` on are hidden, those beyond `most` do not fit."""

    def __init__(self, threshold: int, most: int = 1 << 60) -> None:
        self.threshold, self.most, self.times = threshold, most, 0

    def __call__(self, count: int) -> bool | None:
        self.times += 1
        return None if count > self.most else count >= self.threshold


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_the_answer_hides_the_store_and_is_not_far_above_what_does(threshold: int, now: int) -> None:
    asked = Asked(threshold)
    found, tried, limited = fewest(asked, now, hidden_now=now >= threshold)
    assert asked.times <= MOST_PLANS and not limited
    if found is None:
        assert threshold > tried >= 64 * now  # seven doublings, each planned
        return
    assert found >= threshold
    if 32 * now >= threshold and 16 * threshold >= now:  # far from the recipe's batch fewer questions are left
        assert found - threshold <= max(1, 0.2 * found)


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_what_does_not_fit_is_the_end(now: int, more: int) -> None:
    asked = Asked(now + more, most=now + more - 1)
    found, tried, limited = fewest(asked, now, hidden_now=False)
    assert found is None and tried <= asked.most
    if not limited:
        assert tried == 128 * now
    elif asked.most <= 16 * now:  # near the recipe's batch it is known well
        assert asked.most - tried <= max(1, 0.1 * asked.most)


@given(st.integers(1, 4096), st.integers(0, 4096))
def test_smaller_batches_may_hide_what_larger_ones_do_not(now: int, hidden_to: int) -> None:
    """What they keep is not on the ssd then."""
    times = 0

    def hidden(count: int) -> bool:
        nonlocal times
        times += 1
        return count <= hidden_to

    found = most_below(hidden, now + hidden_to) if now + hidden_to > 1 else None
    assert times <= MOST_PLANS
    if found is not None:
        assert found <= hidden_to
        if 4 * hidden_to >= now + hidden_to:
            assert hidden_to - found <= max(1, 0.1 * hidden_to)
    elif 16 * hidden_to >= now + hidden_to > 1:
        assert hidden_to == 0


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
    assert fewest(Asked(64), 64, hidden_now=True) == (64, 64, False)
    assert fewest(Asked(1), 64, hidden_now=True)[0] == 1
    assert fewest(Asked(65), 64, hidden_now=False)[0] in range(65, 70)


def test_what_does_not_fit_below_the_recipe_s_batch_is_not_asked_for_again() -> None:
    asked: list[int] = []

    def hidden(count: int) -> bool | None:
        asked.append(count)
        return None if count < 60 else True

    assert fewest(hidden, 100, hidden_now=True)[0] in range(60, 65)
    assert len(asked) == len(set(asked)) <= MOST_PLANS
