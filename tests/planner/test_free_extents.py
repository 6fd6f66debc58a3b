"""Tests places of the store that take turns: nothing is written over that a crash would go back to, and nobody waits for
ever."""

from __future__ import annotations

from dataclasses import replace

from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.planner.free_extents import CommitLedger, left_before
from fuyou_cli.planner.place import least_memory, plan
from fuyou_cli.planner.placement_context import PlacementContext
from fuyou_cli.planner.run_planner import RunPlanner, at_rest, redone, with_fitting_mode
from fuyou_cli.spec.plan import Ring

from .models import HARDWARE, models, request_for


@given(st.data(), st.integers(1, 7), st.integers(1, 3))
def test_no_place_is_filled_that_a_manifest_names(data: st.DataObject, stages: int, spares: int) -> None:
    """Updates stages in order, step after step; writes manifests at any time between."""
    spares = spares if stages == 1 else min(spares, stages)
    rings = [Ring(offset=0, size=1, index=index, stages=stages, spares=spares) for index in range(stages)]
    turns, durable = [0] * stages, [0] * stages
    kept = [tuple(durable)]  # manifests that can be gone back to: of shared places the newest alone
    for _ in range(4):
        for index, ring in enumerate(rings):
            if data.draw(st.booleans()):
                durable = [*turns]
            other, turn = left_before(ring, turns[index])
            if durable[other] < turn:
                durable = [*turns]
            assert durable[other] >= turn, "what has been come to is enough, once it is named"
            if kept[-1] != tuple(durable):
                kept = [*kept, tuple(durable)][-(spares if stages == 1 else 1) :]
            target = ring.place(turns[index] + 1)
            assert target not in {one.place(turn) for manifest in kept for one, turn in zip(rings, manifest, strict=True)}
            assert target not in {one.place(turn) for one, turn in zip(rings, turns, strict=True)}
            turns[index] += 1
    assert {ring.place(turn) for ring in rings for turn in range(50)} == set(range(stages + spares))


def test_between_commits_updates_are_in_place() -> None:
    ledger = CommitLedger(every=3, base=4)
    turns = [0]
    for generation in range(4, 12):
        turns.append(ledger.next_turn(turns[-1], generation))
    assert turns == [0, 1, 1, 2, 2, 2, 3, 3, 3]  # 4 is the base, 6 and 9 are committed
    assert [ledger.is_written(generation) for generation in (5, 6, 7, 9)] == [False, True, False, True]
    ends = CommitLedger(every=None, base=0)
    assert [ends.next_turn(1, generation) for generation in (0, 1, 50)] == [2, 1, 1] and not ends.is_written(50)


@given(st.data(), models())
def test_redo_is_chosen_where_two_extents_have_no_room(data: st.DataObject, spec) -> None:  # type: ignore[no-untyped-def]
    request = replace(data.draw(request_for(spec, pinned=False)), may_redo=True)
    twice, once = at_rest(spec, request, "in_place"), at_rest(spec, request, "redo")
    assert twice == 2 * sum(PlacementContext(spec, request).at_rest[stage.index].ring.size for stage in spec.stages)
    for disk in (twice, twice - 1, once, once - 1):
        chosen = with_fitting_mode(spec, request, disk)
        assert chosen.store_mode == ("redo" if once <= disk < twice else "in_place")
        assert chosen.gradients == ("ssd" if chosen.store_mode == "redo" else request.gradients)


@examples(40)
@given(st.data(), models(), st.sampled_from([(0, 0), (0, -1), (1, 0), (1, -1)]))
def test_redo_is_taken_where_what_a_step_leaves_has_no_room(  # type: ignore[no-untyped-def]
    data: st.DataObject, spec, room: tuple[int, int]
) -> None:
    """Takes redo where two extents may fit, and the gradients and boundaries beside them not."""
    request = replace(data.draw(request_for(spec, pinned=False)), may_redo=True)
    tight = max(least_memory(spec, HARDWARE, asked) for asked in (request, redone(request)))
    request = replace(request, cpu_budget=tight + data.draw(st.integers(0, 1 << 22)))
    whole, once = (plan(spec, HARDWARE, asked).store_size for asked in (request, redone(request)))
    disk = (whole, once)[room[0]] + room[1]
    asked = replace(request, ssd_budget=disk)
    found = RunPlanner(HARDWARE, effort="fit").plan(spec, asked, steps=0).plan
    assert (found.store_size <= disk) == (disk >= min(whole, once))
    if disk >= whole:
        assert found.store_mode == "in_place"
    kept = RunPlanner(HARDWARE, effort="fit").plan(spec, replace(asked, may_redo=False), steps=0).plan
    assert kept.store_mode == "in_place"
