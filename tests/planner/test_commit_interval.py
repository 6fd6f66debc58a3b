"""Tests commits of what rests in RAM: as often as they take little of the time and of what is written, and no oftener; and
places of the store that take turns: nothing is written over that a crash would go back to."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from drawn import examples
from hypothesis import assume, example, given
from hypothesis import strategies as st

from fuyou_cli.core.units import MiB
from fuyou_cli.planner.commit_interval import (
    LITTLE_LOST,
    MOST_LOST,
    MOST_TIME,
    MOST_WRITTEN,
    commit_costs,
    least_interval,
    resting_in_ram,
    sooner,
    timed_plan,
    with_longer_steps,
)
from fuyou_cli.planner.ledgers import CommitLedger
from fuyou_cli.planner.place import least_memory
from fuyou_cli.planner.place import plan as first_that_fits
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.simulate import STEPS, simulate
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import ExtentPair, Plan, Tier
from fuyou_cli.training.length import RunLimits, saved_where_it_stops, steps_within_writes, written_by_step

from .models import HARDWARE, models, request_for

SLOW = replace(HARDWARE, store_read=4e8, store_write=2e8, store_read_mixed=3e8, store_write_mixed=1.5e8)
ALLOWED = 0.03  # of a run: all that its commits may take


@examples(200)
@example(step=0.7, commit=0.7, written=1, resting=1)  # 39 steps, but for the last bit
@given(step=st.floats(0.01, 1e4), commit=st.floats(0, 1e4), written=st.integers(0, 10**12), resting=st.integers(0, 10**12))
def test_no_interval_is_shorter_than_its_bounds_or_longer_than_they_ask(
    step: float, commit: float, written: int, resting: int
) -> None:
    def holds(every: int, slack: float = 1e-9) -> bool:  # for rounding; against it where a bound is to be missed
        in_time = commit <= MOST_TIME * (every * step + commit) * (1 + slack)
        in_writes = resting <= MOST_WRITTEN * (every * written + resting) * (1 + slack)
        return in_time and (in_writes or (every + 1) * step > MOST_LOST)

    every = least_interval(step=step, commit=commit, written=written, resting=resting)
    assert every == 1 or (holds(every) and not holds(every - 1, -1e-9)) or (every + 1) * step > MOST_LOST
    assert holds(every) or not resting


def _planned(data: st.DataObject, spec: ModelSpec, *, states: Tier | None, every: Any = "auto", **changes: Any) -> Plan:
    """The first plan that fits, its interval found by what is simulated."""
    request = replace(data.draw(request_for(spec, pinned=False)), commit_every=every, states=states, **changes)
    request = replace(request, cpu_budget=least_memory(spec, SLOW, request) + data.draw(st.integers(0, 8)) * 8 * MiB)
    return timed_plan(spec, SLOW, first_that_fits(spec, SLOW, request), chosen=every == "auto")


def _end(spec: ModelSpec, plan: Plan, steps: int) -> float:
    return simulate(spec, SLOW, plan, plan_schedule(spec, plan), steps=steps, commits=True, jobs=False).end


@examples(15)
@given(data=st.data(), spec=models(most=1 << 20), states=st.sampled_from([None, "cpu"]))
def test_commits_take_no_more_than_their_share(data: st.DataObject, spec: ModelSpec, states: Tier | None) -> None:
    """All steps of some intervals, simulated, beside as many without a commit."""
    plan = _planned(data, spec, states=states)
    every, costs = plan.commit_every, commit_costs(plan)
    assert MOST_TIME < 0.03 and MOST_WRITTEN == 0.3, "what is promised"
    assert every is not None and costs is not None and costs.time <= MOST_TIME * (1 + 1e-9)
    if not 1 < every <= 60:  # nothing to share, or too many steps to simulate; many drawn cases are such
        return
    assert costs.written <= MOST_WRITTEN * (1 + 1e-3) or costs.lost > MOST_LOST
    steps = max(1, 20 // every) * every + STEPS
    with_commits, without = _end(spec, plan, steps), _end(spec, replace(plan, commit_every=None), steps)
    assert 1 - without / with_commits <= ALLOWED


@examples(15)
@given(data=st.data(), spec=models(most=1 << 20))
def test_commits_before_the_last_take_no_more_than_their_share_of_any_run(data: st.DataObject, spec: ModelSpec) -> None:
    """Even where steps hide nothing of them, though by simulation a step that computes for long hides all: a run of minutes has
    one, at its end."""
    slow = replace(SLOW, matmul_flops=1e9)
    request = replace(data.draw(request_for(spec, pinned=False)), commit_every="auto")
    request = replace(request, cpu_budget=least_memory(spec, slow, request) + data.draw(st.integers(1, 16)) * 4 * MiB)
    plan = timed_plan(spec, slow, first_that_fits(spec, slow, request), chosen=True)
    assume(any(stage.states != "ssd" and stage.momentum_at.size for stage in plan.stages))
    alone, every = resting_in_ram(plan) / slow.store_write, plan.commit_every
    steps = data.draw(st.integers(1, 1000))
    assert every is not None
    assert alone * ((steps - 1) // every) <= MOST_TIME * (steps * plan.plain_seconds + alone * (steps // every)) * (1 + 1e-9)
    if (steps - 1) * plan.plain_seconds < alone * (1 - MOST_TIME) / MOST_TIME * (1 - 1e-9):
        assert every >= steps, "only at the end"


@examples(15)
@given(data=st.data(), spec=models(most=1 << 20))
def test_where_ranks_wait_for_others_they_commit_sooner(data: st.DataObject, spec: ModelSpec) -> None:
    plan = _planned(data, spec, states="cpu")
    assume(plan.commit_every is not None and plan.commit_every > 2)
    assert with_longer_steps(spec, SLOW, plan, plan.plain_seconds) == plan
    longer = with_longer_steps(spec, SLOW, plan, 1e9)
    assert longer.stages == plan.stages and longer.commit_every == 2


@examples(15)
@given(data=st.data(), spec=models(most=1 << 20), every=st.sampled_from([None, 10**5, 10**7, 10**9]))
def test_commits_that_lose_little_are_as_rare_as_that_allows(data: st.DataObject, spec: ModelSpec, every: int | None) -> None:
    plan = _planned(data, spec, states="cpu", every=every)
    before = commit_costs(plan)
    soon = sooner(spec, SLOW, plan)
    if before is not None and before.lost <= LITTLE_LOST:
        assert soon is None
        return
    assert soon is not None and soon.commit_every is not None and soon.stages == plan.stages
    step, seconds = soon.plain_seconds, soon.predicted.commit_seconds
    costs = commit_costs(soon)
    assert costs is not None and (costs.lost <= LITTLE_LOST * (1 + 1e-9) or soon.commit_every == 1 or every is None)
    rarer = soon.commit_every + 1
    assert (rarer + 1) * (step + seconds / rarer) > LITTLE_LOST or every is None
    assert sooner(spec, SLOW, soon) is None


@examples(12)
@given(data=st.data(), spec=models(most=1 << 20))
def test_states_on_the_ssd_are_committed_every_step(data: st.DataObject, spec: ModelSpec) -> None:
    plan = _planned(data, spec, states="ssd")
    assert plan.commit_every == 1 and plan.predicted.commit_seconds == 0
    assert plan.predicted.written_per_step == plan_schedule(spec, plan).traffic.written_total


@examples(12)
@given(data=st.data(), spec=models(most=1 << 20))
def test_figures_are_averages_of_the_steps_between_commits(data: st.DataObject, spec: ModelSpec) -> None:
    plan = _planned(data, spec, states="cpu")
    assert plan.commit_every is not None
    assume(plan.has_apart_commits)
    plain = simulate(spec, SLOW, plan, plan_schedule(spec, plan))
    assert plain.step_seconds == pytest.approx(plan.plain_seconds, rel=1e-9)
    assert plain.written == pytest.approx(written_by_step(plan), abs=8 * len(plan.stages))
    each = resting_in_ram(plan) / plan.commit_every
    assert plan.predicted.written_per_step == pytest.approx(plain.written + each, abs=8 * len(plan.stages))
    longer = sum(plan.predicted.stalls.values()) - sum(plain.stalls.values())
    assert longer == pytest.approx(plan.predicted.step_seconds - plan.plain_seconds, abs=1e-12)


@examples(12)
@given(data=st.data(), spec=models(most=1 << 20))
def test_steps_between_commits_write_nothing_where_all_rests_in_ram(data: st.DataObject, spec: ModelSpec) -> None:
    """Rounds averages stage by stage: what is left of them is no negative number."""
    request = replace(data.draw(request_for(spec, pinned=False)), commit_every=428, cpu_budget=1 << 36)
    plan = timed_plan(spec, SLOW, first_that_fits(spec, SLOW, request), chosen=False)
    assume(simulate(spec, SLOW, plan, plan_schedule(spec, plan)).written == 0)
    assert written_by_step(plan) == 0 < plan.predicted.written_per_step


@examples(15)
@given(
    data=st.data(), spec=models(most=1 << 20), every=st.sampled_from([None, 1, 2, 3, 7]), done=st.integers(0, 20),
    room=st.integers(0, 1 << 30),
)  # fmt: skip
def test_a_run_stops_before_the_step_that_would_write_too_much(
    data: st.DataObject, spec: ModelSpec, every: int | None, done: int, room: int
) -> None:
    """Stops it as the plan says beforehand, and with what saving takes still free."""
    plan = _planned(
        data, spec, states=data.draw(st.sampled_from(["cpu", "ssd"])), every=every, defer=False, clip_grad_norm=None
    )
    plain, saved = written_by_step(plan), saved_where_it_stops(plan)
    assume(plain > room >> 7 or saved > room >> 7)
    recipe: Any = SimpleNamespace(train=SimpleNamespace(max_time=None), offload=SimpleNamespace(ssd_write_limit=room))
    limits, step, total = RunLimits(recipe, plan), done, 0
    limits.begin(step, 0)
    while step < done + 1000 and limits.reached(seconds=0, written=total) is None:
        step += 1
        wrote = plain + saved * (plan.has_apart_commits and every is not None and step % every == 0)
        total += wrote
        took: Any = SimpleNamespace(step=step, seconds=1.0, written_bytes=wrote)
        limits.took(took)
    assume(step < done + 1000)  # nothing is written, so nothing stops it
    assert step - done == steps_within_writes(plan, room, done=done)
    is_saved = every is not None and step % every == 0
    assert step == done or total + saved * (not is_saved) <= room


# ---- places that take turns ------------------------------------------------------------------------------------------


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
