"""The schedule and the plan of models whose embedding and head are cut along the vocabulary."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.core import process
from fuyou_cli.planner.memory import compute_memory
from fuyou_cli.planner.place import plan
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.schedule import Schedule, plan_schedule, updates_traffic, visits_traffic
from fuyou_cli.spec.model import ITEM_SIZE, ModelSpec
from fuyou_cli.spec.plan import Plan

from .models import HARDWARE, NUMERICS, cut, cut_models, model, request_for, with_budget
from .test_place import ROOMY, durable, least


@st.composite
def scheduled(draw: st.DrawFn) -> tuple[ModelSpec, Plan, Schedule]:
    spec = draw(cut_models())
    chosen = plan(spec, HARDWARE, with_budget(draw(request_for(spec)), ROOMY))
    return spec, chosen, plan_schedule(spec, chosen)


def assert_two_passes_over_the_head_the_second_one_back(spec: ModelSpec, schedule: Schedule) -> None:
    body = [stage.index for stage in spec.stages if stage.kind != "head"]
    heads = [stage.index for stage in spec.stages if stage.kind == "head"]
    assert len(heads) >= 2
    assert [(visit.phase, visit.stage) for visit in schedule.visits] == [
        *(("forward", i) for i in body), *(("logits", i) for i in heads), *(("head", i) for i in reversed(heads)),
        *(("backward", i) for i in reversed(body)),
    ]  # fmt: skip
    turn = [visit for visit in schedule.visits if visit.stage == heads[-1]]
    assert [visit.phase for visit in turn] == ["logits", "head"] and not turn[1].fetch


def assert_every_piece_is_updated_once_and_each_sum_is_finished_once(spec: ModelSpec, schedule: Schedule) -> None:
    """Rests gradients of a piece with two users after the head, and resumes them by the embedding; of any other, never."""
    updated = [visit.owner for visit in schedule.visits if visit.update != "none"]
    assert sorted(owner for owner in updated if owner is not None) == [s.index for s in spec.stages if s.params]
    resting = [visit.owner for visit in schedule.visits if visit.rest]
    resumed = [visit.stage for visit in schedule.visits if visit.resume]
    pieces = [stage.index for stage in spec.stages if stage.kind == "embedding"] if spec.tied_head else []
    assert sorted(owner for owner in resting if owner is not None) == sorted(resumed) == pieces
    summed = [visit for visit in schedule.visits if visit.sum_gradients]
    assert {visit.phase for visit in summed} == {"head", "backward"}
    rows = {stage.index: stage.vocabulary for stage in spec.stages}
    for visit in schedule.visits:
        if visit.phase in ("logits", "head"):
            assert visit.owner is not None and rows[visit.owner] == rows[visit.stage]
            assert (visit.owner == visit.stage) == (not spec.tied_head)


def assert_gradients_that_rest_have_a_home_and_are_charged(spec: ModelSpec, chosen: Plan, schedule: Schedule) -> None:
    item, moved = ITEM_SIZE[chosen.numerics.accumulate_dtype], 0
    for stage, placed in zip(spec.stages, chosen.stages, strict=True):
        times = int(placed.deferred) + int(spec.tied_head and stage.kind == "embedding")
        homes = [home for home in (placed.gradients_ram, placed.gradients_extent) if home is not None]
        assert len(homes) == (1 if times and stage.params else 0)
        assert all(home.size == item * stage.params for home in homes)
        if placed.gradients_extent is not None:
            moved += times * item * stage.params
            assert chosen.slot_classes[placed.slot_class].gradient_slots
    assert schedule.traffic.read["gradients"] == schedule.traffic.written["gradients"] == moved
    assert chosen.predicted.read_by == schedule.traffic.read
    traffic, updated = schedule.traffic, [placed for placed in chosen.stages if spec.stages[placed.stage].trained]
    parts = [
        visits_traffic(spec, schedule.visits, chosen.stages, chosen.fill),
        updates_traffic(spec, updated, chosen.commit_every),
    ]
    assert tuple(map(sum, zip(*parts, strict=True))) == (traffic.read_total, traffic.written_total)


def assert_no_more_slots_than_computing_and_updating_take(chosen: Plan) -> None:
    """Keeps one more slot of gradients through backward for a tied head that is not cut: pieces rest instead."""
    for slots in chosen.slot_classes:
        assert len(slots.gradient_slots) <= 2
        assert len(slots.weight_slots) <= 1 + chosen.lookahead + 1


@given(scheduled())
def test_what_holds_where_a_vocabulary_is_cut(case: tuple[ModelSpec, Plan, Schedule]) -> None:
    spec, chosen, schedule = case
    assert_two_passes_over_the_head_the_second_one_back(spec, schedule)
    assert_every_piece_is_updated_once_and_each_sum_is_finished_once(spec, schedule)
    assert_gradients_that_rest_have_a_home_and_are_charged(spec, chosen, schedule)
    assert_no_more_slots_than_computing_and_updating_take(chosen)


@given(cut_models().flatmap(lambda spec: st.tuples(st.just(spec), request_for(spec))), st.data())
def test_any_budget_from_just_enough_keeps_pins_and_durable_spans(
    case: tuple[ModelSpec, PlanRequest], data: st.DataObject
) -> None:
    spec, request = case
    roomy = plan(spec, HARDWARE, with_budget(request, ROOMY))
    low = least(spec, request)
    budget = data.draw(st.integers(low, max(low, roomy.predicted.cpu_peak)))
    chosen = plan(spec, HARDWARE, with_budget(request, budget))
    assert chosen.predicted.cpu_peak <= budget
    assert [durable(stage) for stage in chosen.stages] == [durable(stage) for stage in roomy.stages]
    if request.gradients is not None:
        resting = [p for p, stage in zip(chosen.stages, spec.stages, strict=True) if stage.params and p.deferred]
        assert {placed.gradients for placed in resting} <= {request.gradients}


LEAF = 1 << 20


def _request(clip: float | None) -> PlanRequest:
    """Makes two micro-batches of two rows, everything on the ssd."""
    return PlanRequest(
        numerics=replace(NUMERICS, torch_threads=1), model_name="test", device="cpu", clip_grad_norm=clip, cpu_budget=ROOMY,
        weights="ssd", states="ssd", gradients="ssd", boundaries="ssd", lookahead=1,
    )  # fmt: skip


def test_the_head_is_computed_once_more() -> None:
    """Computes logits, logits again and their gradients: 8 operations per weight and token, where a whole head takes 6."""
    whole = model(LEAF, LEAF, 2048, LEAF)
    flops = [plan(spec, HARDWARE, _request(None)).predicted.compute_flops for spec in (whole, cut(whole, *[LEAF // 4] * 4))]
    micro_batches = 2
    head = whole.stages[-1].forward_flops
    assert flops[1] - flops[0] == micro_batches * head == micro_batches * 2 * LEAF


@pytest.mark.parametrize("clip", [None, 1.0], ids=["unclipped", "clipped"])
def test_bytes_of_a_tied_step_by_hand(clip: float | None) -> None:
    """Of each piece: weights for the logits and for the head, which begins with the two that were last, written once; gradients
    out and back between the users, and once more until the norm is known. Forward begins with the two pieces that were last:
    unclipped of backward, which reads all for their update; clipped of the head."""
    whole = model(LEAF, LEAF, 2048, LEAF, tied=True)
    tied = plan(cut(whole, *[LEAF // 4] * 4), HARDWARE, _request(clip)).predicted
    gradients = 4 * LEAF + (0 if clip is None else 4 * (2 * LEAF + 2048))
    assert tied.read_by["gradients"] == tied.written_by["gradients"] == gradients
    block, norm, piece = 2 * 2 * LEAF, 2 * 2 * 2048, 2 * LEAF // 4
    logits, head, forward, backward = 4, 2, 2, 4 if clip is None else 0
    assert tied.read_by["weights"] == block + norm + (logits + head + forward + backward) * piece
    assert tied.written_by["weights"] == 2 * (2 * LEAF + 2048)


def test_what_every_token_keeps_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charges the last hidden state, its gradient and that in float32, and three numbers, where forward has three
    boundaries."""
    monkeypatch.setattr(process, "HELD", 0.0)
    whole = model(LEAF, LEAF, 2048, LEAF, hidden=1024)
    both = [compute_memory(spec, _request(None)).whole_batch for spec in (whole, cut(whole, LEAF // 2, LEAF // 2))]
    assert both[1] - both[0] == (2 * 2048 + 4 * 1024 + 12 - 3 * 2048) * 4 * 64
