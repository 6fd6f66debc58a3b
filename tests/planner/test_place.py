"""Tests what holds for every plan, on models and requests drawn at random, and what updates in the next forward move."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.core.errors import PlanError
from fuyou_cli.core.units import GiB, MiB, align_up, parse_size
from fuyou_cli.planner.boundary_layout import Kept, planned_boundary
from fuyou_cli.planner.fill import GreedyFill, Output, outputs_of
from fuyou_cli.planner.layout import ARENA_UNIT, Homes, SharedSizes
from fuyou_cli.planner.place import Candidate, least_memory, made_of, plan
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.spec.model import ITEM_SIZE, ModelSpec, OperatorSpec
from fuyou_cli.spec.plan import Plan, Span, StagePlan, StateTensor, Tier

from .models import HARDWARE, NUMERICS, cut_models, model, models, request, request_for, with_budget

ROOMY = 1 << 40


def least(spec: ModelSpec, request: PlanRequest) -> int:
    """Returns the smallest budget that is not refused, in whole MiB; the refusal of an impossible one names it, or a little
    more as it is shown."""
    enough = least_memory(spec, HARDWARE, request)
    with pytest.raises(PlanError) as refused:
        plan(spec, HARDWARE, with_budget(request, 1))
    named = re.search(r"at least (\S+ \w+) of RAM", refused.value.message)
    assert named is not None and enough <= parse_size(named[1]) <= max(align_up(enough, MiB), enough + GiB // 100)
    return align_up(enough, MiB)


@st.composite
def planned(draw: st.DrawFn) -> tuple[ModelSpec, PlanRequest, Plan]:
    """Plans at any budget between just enough and plenty."""
    spec = draw(models())
    request = draw(request_for(spec))
    low = least(spec, request)
    high = max(low, plan(spec, HARDWARE, with_budget(request, ROOMY)).predicted.cpu_peak)
    request = with_budget(request, draw(st.integers(low, high)))
    return spec, request, plan(spec, HARDWARE, request)


def in_arena(chosen: Plan) -> list[Span]:
    spans = [span for slots in chosen.slot_classes for span in (*slots.weight_slots, *slots.gradient_slots)]
    spans += [*chosen.boundary_slots, *chosen.upload_slots, *chosen.batch_slots, chosen.io.scratch]
    for stage in chosen.stages:
        homes = (stage.weights_ram, stage.remainder_ram, stage.momentum_ram, stage.variance_ram)
        turns = [stage.gradients_ram, stage.boundary_ram]
        if stage.takes_turns:  # one memory, whose size is that of the larger
            turns = [max((span for span in turns if span), key=lambda span: span.size)]
        spans += [span for span in (*homes, *turns) if span is not None]
    return spans


def durable(stage: StagePlan, turn: int = 0) -> list[Span]:
    return [extent for name in get_args(StateTensor) if (extent := stage.extent(name, turn)) is not None]


def in_store(chosen: Plan, turn: int = 0) -> list[Span]:
    """Returns what is there once stages have come to this turn."""
    passing = [span for stage in chosen.stages for span in (stage.gradients_extent, stage.boundary_extent) if span]
    return [extent for stage in chosen.stages for extent in durable(stage, turn)] + passing


def assert_apart(spans: Iterable[Span], size: int) -> None:
    """No two overlap, all are aligned for direct I/O and inside [0, size)."""
    taken = sorted((span.offset, span.offset + span.size) for span in spans if span.size)
    assert all(before <= begin for (_, before), (begin, _) in pairwise(taken))
    assert all(begin % 4096 == 0 for begin, _ in taken)
    assert taken[0][0] >= 0 and taken[-1][1] <= size


def assert_boundaries_are_read_ahead(chosen: Plan) -> None:
    """Those on the ssd have a slot for each visit that is looked ahead to, for the one at work, and for one being written."""
    on_ssd = sum(placed.boundary == "ssd" for placed in chosen.stages)
    assert len(chosen.boundary_slots) >= min(chosen.lookahead + 2, on_ssd)


def assert_spans_and_extents_never_overlap(chosen: Plan) -> None:
    assert_apart(in_arena(chosen), chosen.arena_size)
    for turn in (0, 1, 2, 7):
        assert_apart(in_store(chosen, turn), chosen.store_size)


def assert_every_stage_has_room_for_what_it_needs(spec: ModelSpec, request: PlanRequest, chosen: Plan) -> None:
    weight, gradient = ITEM_SIZE[spec.compute_dtype], ITEM_SIZE[request.numerics.accumulate_dtype]
    for stage, placed in zip(spec.stages, chosen.stages, strict=True):
        slots = chosen.slot_classes[placed.slot_class]
        sizes = [weight, *([2] if placed.remainder_at else []), 4, 4]
        assert [extent.size for extent in durable(placed)] == [size * stage.params for size in sizes if stage.params]
        if stage.params == 0:
            continue
        homes = [placed.weights_ram] if placed.weights == "cpu" else slots.weight_slots
        assert homes and all(span is not None and span.size >= weight * stage.params for span in homes)
        at_rest = [placed.gradients_ram] if placed.gradients_ram else slots.gradient_slots
        assert at_rest and all(span.size >= gradient * stage.params for span in at_rest)
        assert (placed.momentum_ram is not None) == (placed.states == "cpu")
        if stage.kind in ("block", "norm"):
            rooms = [placed.boundary_ram] if placed.boundary == "cpu" else chosen.boundary_slots
            boundary = planned_boundary(spec, request.numerics, stage.index, placed.kept).size
            everything = tuple(operator.index for operator in stage.operators)
            assert placed.kept == everything if request.kept else set(placed.kept) <= set(everything)
            assert rooms and all(span is not None and span.size >= boundary for span in rooms)
            assert (placed.boundary_extent is not None) == (placed.boundary == "ssd")


def assert_the_predicted_peak_is_inside_the_budget(request: PlanRequest, chosen: Plan) -> None:
    assert chosen.arena_size + HARDWARE.process_bytes < chosen.predicted.cpu_peak <= request.cpu_budget
    assert chosen.predicted.ssd_bytes == chosen.store_size


def assert_pins_are_kept(spec: ModelSpec, request: PlanRequest, chosen: Plan) -> None:
    for stage, placed in zip(spec.stages, chosen.stages, strict=True):
        assert request.weights in (None, placed.weights)
        assert request.states in (None, placed.states)
        if placed.deferred:
            assert request.gradients in (None, placed.gradients)
        if stage.kind in ("block", "norm"):
            assert request.boundaries in (None, placed.boundary)
    assert request.lookahead in (None, chosen.lookahead)


@given(planned(), st.integers(1, 4))
def test_what_holds_for_every_plan(case: tuple[ModelSpec, PlanRequest, Plan], lookahead: int) -> None:
    """The same inputs give the same plan. What survives a run is the same for a stopped run resumed with another budget, other
    pins, another lookahead."""
    spec, request, chosen = case
    assert_boundaries_are_read_ahead(chosen)
    assert_spans_and_extents_never_overlap(chosen)
    assert_every_stage_has_room_for_what_it_needs(spec, request, chosen)
    assert_the_predicted_peak_is_inside_the_budget(request, chosen)
    assert_pins_are_kept(spec, request, chosen)
    again = plan(spec, HARDWARE, request)
    assert again == chosen and repr(again) == repr(chosen)
    other = PlanRequest(
        numerics=request.numerics, model_name="test", device="cpu", clip_grad_norm=request.clip_grad_norm,
        cpu_budget=ROOMY, lookahead=lookahead,
    )  # fmt: skip
    elsewhere = plan(spec, HARDWARE, other)
    assert [durable(stage) for stage in chosen.stages] == [durable(stage) for stage in elsewhere.stages]


@given(models().flatmap(lambda spec: st.tuples(st.just(spec), request_for(spec))))
def test_a_refusal_names_enough_memory(case: tuple[ModelSpec, PlanRequest]) -> None:
    spec, request = case
    enough = least(spec, request)
    assert plan(spec, HARDWARE, with_budget(request, enough)).predicted.cpu_peak <= enough
    with pytest.raises(PlanError, match="the run needs at least") as refused:
        plan(spec, HARDWARE, with_budget(request, enough - 2 * MiB))
    assert refused.value.exit_code == 3 and refused.value.hint is None  # what would help has to be planned first


@given(models(unit=2 << 20, most=64 << 20).flatmap(lambda s: st.tuples(st.just(s), request_for(s))), st.data())
def test_more_memory_does_not_mean_more_traffic(case: tuple[ModelSpec, PlanRequest], data: st.DataObject) -> None:
    """Compares at equal overlap, which has its own price, and but for the last tensor: one that just fits may leave less room
    than the two it displaced. At most three bytes a step per byte."""
    spec, request = case
    lookahead = min(request.lookahead or 1, len(spec.stages))
    candidate = Candidate(lookahead=lookahead, gradient_slots=1, defer=request.defer or False)

    def planned_in(budget: int) -> Plan:
        made = made_of(spec, HARDWARE, replace(request, cpu_budget=budget, kept=request.kept or "none"), candidate)
        assert made is not None
        return made

    low = least(spec, request)
    high = max(low, planned_in(ROOMY).predicted.cpu_peak)
    budgets = sorted(data.draw(st.lists(st.integers(low, high), min_size=2, max_size=4)))
    for less, more in pairwise(planned_in(budget).predicted for budget in budgets):
        traffic = [predicted.read_per_step + predicted.written_per_step for predicted in (less, more)]
        assert traffic[1] <= traffic[0] + 3 * 8 * max(stage.params for stage in spec.stages)


@given(models().flatmap(lambda spec: st.tuples(st.just(spec), request_for(spec, pinned=False))))
def test_with_room_for_everything_nothing_moves(case: tuple[ModelSpec, PlanRequest]) -> None:
    spec, request = case
    assert _moves_nothing(plan(spec, HARDWARE, with_budget(request, ROOMY)))


@given(models(unit=2 << 20, most=64 << 20).flatmap(lambda s: st.tuples(st.just(s), request_for(s, pinned=False))), st.data())
def test_where_everything_fits_it_is_in_memory(case: tuple[ModelSpec, PlanRequest], data: st.DataObject) -> None:
    """Plans in any budget from what that takes on, at equal overlap. Smaller stages than hugepages may not fit as they did."""
    spec, request = case
    request = replace(request, lookahead=request.lookahead or 1)
    enough = plan(spec, HARDWARE, with_budget(request, ROOMY))
    budget = enough.predicted.cpu_peak + data.draw(st.integers(0, 1 << 30))
    assert _moves_nothing(plan(spec, HARDWARE, with_budget(request, budget)))


def _moves_nothing(chosen: Plan) -> bool:
    return chosen.predicted.read_per_step == chosen.predicted.written_per_step == 0


def test_memory_goes_where_it_saves_most() -> None:
    """Puts weights in RAM first: they are read twice and written once, states once each."""
    spec = model(64 << 20, *[64 << 20] * 6, 2048, 64 << 20, hidden=64)
    numerics = replace(NUMERICS, accumulate_dtype="bfloat16", batch_size=8, micro_batch_size=8)
    request = PlanRequest(
        numerics=numerics, model_name="test", device="cpu", clip_grad_norm=None, cpu_budget=4 * GiB,
        lookahead=1,
    )  # fmt: skip
    chosen = plan(spec, HARDWARE, request)
    blocks = chosen.stages[1:-2]
    assert {stage.weights for stage in blocks} == {"cpu"}
    assert {stage.states for stage in blocks} == {"cpu", "ssd"}


# ---- outputs -----------------------------------------------------------------------------------------------------------


def plainly_kept(fill: GreedyFill, outputs: list[Output], share: float) -> tuple[int, Homes]:
    """Keeps outputs one by one, each boundary laid out with it and without; returns the RAM that is left, and the homes."""
    homes, spare, limit = fill.homes, fill.spare, fill.spare - int(fill.spare * share)
    kept, boundaries = list(homes.kept), list(homes.boundaries)
    for output in outputs:
        stage, index = output.stage, output.operator.index
        taken = tuple(sorted((*kept[stage], index)))
        at_home = boundaries[stage] == "cpu"
        if index in (*kept[stage], *homes.kept_there[stage]) or (not at_home and fill.request.boundaries is not None):
            continue
        whole, before = (
            align_up(planned_boundary(fill.shared.model, fill.request.group, stage, some).size, ARENA_UNIT)
            for some in (taken, kept[stage])
        )
        in_turns = fill.turns[stage] if homes.gradients[stage] == "cpu" else 0
        size = max(whole, in_turns) - max(before if at_home else 0, in_turns)
        if spare - size >= limit:
            kept[stage], boundaries[stage], spare = taken, "cpu", spare - size
    return spare, replace(homes, kept=tuple(kept), boundaries=tuple(boundaries))


@given(st.data(), st.integers(0, 200 * MiB), st.sampled_from([0.3, 1.0]), st.sampled_from([None, "ssd", "cpu"]))
def test_outputs_are_kept_as_if_each_were_laid_out(data: st.DataObject, spare: int, share: float, home: Tier | None) -> None:
    """Also where many outputs do not fit, as of a block that computes in chunks, and where some are kept already."""
    operators = tuple(
        OperatorSpec(index=index, name="bmm", flops=flops, bytes=size)
        for index, (flops, size) in enumerate(
            data.draw(
                st.lists(st.tuples(st.floats(1, 9), st.sampled_from([70, 5000, 2 * MiB, 9 * MiB])), min_size=4, max_size=20)
            )
        )
    )
    spec = model(4096, *[4096] * 4, 2048, 4096)
    spec = replace(spec, stages=tuple(replace(one, operators=operators if one.kind == "block" else ()) for one in spec.stages))
    asked = replace(request(), boundaries=home)
    some: Kept = tuple(tuple(o.index for o in one.operators if data.draw(st.booleans())) for one in spec.stages)
    homes = Homes(
        weights=("ssd",) * len(spec.stages), states=("ssd",) * len(spec.stages), gradients=("ssd",) * len(spec.stages),
        boundaries=tuple(home or data.draw(st.sampled_from(("ssd", "cpu"))) for _ in spec.stages),
        kept=some, kept_there=((),) * len(spec.stages),
    )  # fmt: skip
    fill = GreedyFill.of(SharedSizes(spec, asked), asked, homes, {"train": 0, "load": 0})
    fill.spare = spare
    outputs = outputs_of(spec, asked)
    expected = plainly_kept(fill, outputs, share)
    fill.keep(outputs, share=share)
    assert (fill.spare, fill.homes) == expected
    while fill.take_back():
        pass
    assert fill.homes == homes


# ---- updates that wait for the next forward --------------------------------------------------------------------------


ANY = st.one_of(models(), cut_models())


@given(ANY.flatmap(lambda spec: st.tuples(st.just(spec), request_for(spec))), st.data())
def test_gradients_have_a_home_exactly_where_they_rest(case: tuple[ModelSpec, PlanRequest], data: st.DataObject) -> None:
    """Places them at any budget that is not refused: spans are apart, the peak is inside, and a deferred stage's gradients are
    charged."""
    spec, request = case
    low = least(spec, request)
    high = max(low, plan(spec, HARDWARE, with_budget(request, ROOMY)).predicted.cpu_peak)
    chosen = plan(spec, HARDWARE, with_budget(request, data.draw(st.integers(low, high))))
    assert_apart(in_arena(chosen), chosen.arena_size)
    assert_apart(in_store(chosen), chosen.store_size)
    assert chosen.arena_size < chosen.predicted.cpu_peak <= chosen.cpu_budget
    assert all(stage.deferred for stage in chosen.stages) or request.clip_grad_norm is None
    moved = 0
    for stage, placed in zip(spec.stages, chosen.stages, strict=True):
        homes = [span for span in (placed.gradients_ram, placed.gradients_extent) if span is not None]
        times = int(placed.deferred) + int(spec.has_two_users(stage.index))
        assert len(homes) == (1 if times and stage.params else 0)
        if placed.gradients_extent is not None:
            moved += times * stage.params * ITEM_SIZE[chosen.numerics.accumulate_dtype]
    schedule = plan_schedule(spec, chosen)
    assert schedule.traffic.read["gradients"] == schedule.traffic.written["gradients"] == moved
    updates = {visit.owner: visit.update for visit in schedule.visits if visit.update != "none"}
    owning = [stage.index for stage in spec.stages if stage.params]
    assert updates == {index: "before" if chosen.stages[index].deferred else "after" for index in owning}


def test_deferring_costs_the_way_of_the_gradients_and_nothing_else() -> None:
    """Everything on the ssd: weights are fetched as often, states move once, deferred gradients go out and come back."""
    spec = model(1 << 19, *[1 << 20] * 6, 2048, 1 << 19)
    request = PlanRequest(
        numerics=replace(NUMERICS, torch_threads=1), model_name="test", device="cpu", clip_grad_norm=None, cpu_budget=ROOMY,
        weights="ssd", states="ssd", gradients="ssd", boundaries="ssd", lookahead=1,
    )  # fmt: skip
    none = plan(spec, HARDWARE, request).predicted
    deferred = plan(spec, HARDWARE, replace(request, defer=True))
    size = 4 * spec.stored_parameters
    assert deferred.predicted.read_by == {**none.read_by, "gradients": size}
    assert deferred.predicted.written_by == {**none.written_by, "gradients": size}
    (line,) = [line for line in deferred.memory if line.what == "gradients" and line.tier == "ssd"]
    assert line.size == size and "rest until the next forward" in line.policy
