"""One step, and an evaluation, as visits: the order, whose weights, when updates happen, and the traffic that follows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.advice.facts import evaluation_cost, evaluations_left
from fuyou_cli.planner.bound import busy_seconds
from fuyou_cli.planner.boundary_layout import Kept
from fuyou_cli.planner.costs import Costs
from fuyou_cli.planner.place import plan
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.schedule import Schedule, evaluation_schedule, plan_schedule
from fuyou_cli.spec.model import ITEM_SIZE, ModelSpec
from fuyou_cli.spec.plan import Plan

from .models import HARDWARE, NUMERICS, OPERATORS, boundary_bytes, cut_models, model, models, request_for, with_budget


@st.composite
def scheduled(draw: st.DrawFn) -> tuple[ModelSpec, Plan, Schedule]:
    spec = draw(models())
    chosen = plan(spec, HARDWARE, with_budget(draw(request_for(spec)), 1 << 40))
    return spec, chosen, plan_schedule(spec, chosen)


def assert_every_stage_is_visited_in_order(spec: ModelSpec, schedule: Schedule) -> None:
    body, head = list(range(len(spec.stages) - 1)), len(spec.stages) - 1
    expected = [("forward", i) for i in body] + [("head", head)] + [("backward", i) for i in reversed(body)]
    assert [(visit.phase, visit.stage) for visit in schedule.visits] == expected
    assert [visit.index for visit in schedule.visits] == list(range(len(expected)))


def assert_every_stage_is_updated_exactly_once(spec: ModelSpec, chosen: Plan, schedule: Schedule) -> None:
    """After its last use when its update follows backward, before its first when it is deferred; always on a visit that
    has the weights."""
    updates = [visit for visit in schedule.visits if visit.update != "none"]
    assert sorted(visit.owner for visit in updates if visit.owner is not None) == [
        stage.index for stage in spec.stages if stage.params
    ]
    for visit in updates:
        assert visit.owner is not None
        deferred = chosen.stages[visit.owner].deferred
        assert visit.update == ("before" if deferred else "after")
        uses = [other.index for other in schedule.visits if other.owner == visit.owner]
        assert visit.index == (min(uses) if deferred else max(uses))


def assert_boundaries_are_kept_once_and_taken_once(spec: ModelSpec, schedule: Schedule) -> None:
    keeping = {stage.index for stage in spec.stages if stage.kind in ("block", "norm")}
    assert {visit.stage for visit in schedule.visits if visit.stash} == keeping
    assert {visit.stage for visit in schedule.visits if visit.take} == keeping
    assert all(visit.phase == "forward" for visit in schedule.visits if visit.stash)
    assert all(visit.phase == "backward" for visit in schedule.visits if visit.take)


def assert_weights_are_fetched_unless_kept_or_at_home(spec: ModelSpec, chosen: Plan, schedule: Schedule) -> None:
    """A kept span is handed to the owner's next visit, which then fetches nothing; steps follow one another. What is kept, and
    the visit under way, take no more slots of a class than those of the lookahead and one."""
    visits = schedule.visits
    slotted = [stage.weights == "ssd" and spec.stages[stage.stage].params > 0 for stage in chosen.stages]
    held: list[set[int]] = [set() for _ in visits]
    for visit in visits:
        if visit.owner is None:
            assert not visit.fetch and not visit.keep
            continue
        round_again = [*visits[visit.index + 1 :], *visits[: visit.index + 1]]
        away = next(place for place, other in enumerate(round_again) if other.owner == visit.owner)  # visits in between
        if slotted[visit.owner]:
            number = chosen.stages[visit.owner].slot_class
            passed = {v.owner for v in round_again[:away] if v.owner is not None and slotted[v.owner]}
            others = {owner for owner in passed if chosen.stages[owner].slot_class == number}
            streamed = sum(slotted[stage.stage] and stage.slot_class == number for stage in chosen.stages)
            most = min(chosen.lookahead, streamed - 2)  # not all of a class stay, except for a visit within the lookahead
            assert visit.keep == (away < chosen.lookahead or len(others) <= most)
            assert round_again[away].fetch == (not visit.keep)
            for other in [visit, *(round_again[:away] if visit.keep else [])]:
                held[other.index].add(visit.owner)
        else:
            assert not visit.fetch and not visit.keep
    for stages in held:
        numbers = [chosen.stages[stage].slot_class for stage in stages]
        assert all(numbers.count(number) <= chosen.lookahead + 1 for number in numbers)


def assert_traffic_is_the_sum_over_visits_and_stages(spec: ModelSpec, chosen: Plan, schedule: Schedule) -> None:
    item, numerics = ITEM_SIZE[spec.compute_dtype], chosen.numerics
    states = 10 if spec.compute_dtype == "bfloat16" else 8
    gradient = ITEM_SIZE[numerics.accumulate_dtype]
    homes = list(zip(spec.stages, chosen.stages, strict=True))
    on_ssd = {
        kind: sum(stage.params for stage, placed in homes if getattr(placed, kind) == "ssd") for kind in ("weights", "states")
    }
    boundaries = sum(boundary_bytes(spec, numerics, bool(p.kept)) for _, p in homes if p.boundary == "ssd")
    fetched = sum(spec.stages[v.owner].params for v in schedule.visits if v.fetch and v.owner is not None)
    resting = gradient * sum(s.params for s, placed in homes if placed.deferred and placed.gradients == "ssd")
    assert schedule.traffic.read == {
        "weights": item * fetched, "states": states * on_ssd["states"], "gradients": resting, "boundaries": boundaries,
    }  # fmt: skip
    assert schedule.traffic.written == {
        "weights": item * on_ssd["weights"], "states": states * on_ssd["states"], "gradients": resting,
        "boundaries": boundaries,
    }  # fmt: skip
    assert chosen.predicted.read_by == schedule.traffic.read
    assert chosen.predicted.written_by == schedule.traffic.written
    assert chosen.predicted.read_per_step == schedule.traffic.read_total


@given(scheduled())
def test_what_holds_for_every_step(case: tuple[ModelSpec, Plan, Schedule]) -> None:
    spec, chosen, schedule = case
    assert_every_stage_is_visited_in_order(spec, schedule)
    assert_every_stage_is_updated_exactly_once(spec, chosen, schedule)
    assert_boundaries_are_kept_once_and_taken_once(spec, schedule)
    assert_weights_are_fetched_unless_kept_or_at_home(spec, chosen, schedule)
    assert_traffic_is_the_sum_over_visits_and_stages(spec, chosen, schedule)


BLOCK, LEAF, NORM = 1 << 20, 1 << 19, 2048
BLOCKS = 6


def _all_ssd(*, clip: float | None, tied: bool, lookahead: int = 1, kept: Kept | None = None) -> tuple[ModelSpec, Plan]:
    spec = model(LEAF, *[BLOCK] * BLOCKS, NORM, LEAF, tied=tied, dtype="bfloat16")
    numerics = replace(NUMERICS, accumulate_dtype="bfloat16", torch_threads=1)
    request = PlanRequest(
        numerics=numerics, model_name="test", device="cpu", clip_grad_norm=clip, cpu_budget=1 << 40,
        weights="ssd", states="ssd", gradients="ssd" if clip else None, boundaries="ssd", lookahead=lookahead, kept=kept,
    )  # fmt: skip
    return spec, plan(spec, HARDWARE, request)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_bytes_of_a_step_by_hand(clip: float | None) -> None:
    _, chosen = _all_ssd(clip=clip, tied=False)
    parameters = 2 * LEAF + BLOCKS * BLOCK + NORM
    boundaries = (BLOCKS + 1) * 4 * 64 * 1024 * 2
    resting = 2 * parameters if clip else 0
    # The first and the last block stay for the other pass. So does the embedding where its update ends backward, which reads it
    # for that instead.
    read = 2 * ((2 * BLOCKS - 2) * BLOCK + 2 * NORM + 2 * LEAF)
    assert chosen.predicted.read_per_step == read + 10 * parameters + resting + boundaries
    assert chosen.predicted.written_per_step == 12 * parameters + resting + boundaries


@pytest.mark.parametrize(
    ("clip", "fetches"),
    [
        # embedding in forward (kept from the update of the step before), head with its weights, embedding's update
        (None, ["head", "backward"]),
        (1.0, ["forward", "head"]),
    ],
)
def test_a_tied_head_reads_the_embedding(clip: float | None, fetches: list[str]) -> None:
    spec, chosen = _all_ssd(clip=clip, tied=True)
    visits = plan_schedule(spec, chosen).visits
    assert [visit.phase for visit in visits if visit.owner == 0 and visit.fetch] == fetches
    assert {visit.owner for visit in visits if visit.phase == "head"} == {0}
    assert not any(visit.owner == len(spec.stages) - 1 for visit in visits)


@pytest.mark.parametrize("lookahead", [1, 2, 4])
def test_lookahead_keeps_what_is_needed_again_soon(lookahead: int) -> None:
    """Backward begins with the stages that computed last. The norm's backward is two visits after its forward."""
    spec, chosen = _all_ssd(clip=1.0, tied=False, lookahead=lookahead)
    fetched = [visit.stage for visit in plan_schedule(spec, chosen).visits if visit.fetch and visit.phase == "backward"]
    norm = [] if lookahead > 1 else [BLOCKS + 1]
    assert fetched == norm + list(range(BLOCKS - lookahead, 0, -1))  # beside these blocks, the head takes one of their slots


def test_seconds_are_bytes_over_rates() -> None:
    spec, chosen = _all_ssd(clip=1.0, tied=False)
    schedule = plan_schedule(spec, chosen)
    costs = Costs(model=spec, hardware=HARDWARE, numerics=chosen.numerics, device="cpu")
    seconds = busy_seconds(costs, schedule, stages=chosen.stages, device="cpu")
    assert seconds["ssd read"] == schedule.traffic.read_total / HARDWARE.store_read_mixed
    beside = schedule.traffic.read_total / HARDWARE.store_read_mixed * HARDWARE.store_write_mixed  # written meanwhile
    alone = (schedule.traffic.written_total - beside) / HARDWARE.store_write
    assert seconds["ssd write"] == pytest.approx(seconds["ssd read"] + alone)
    compute = sum(visit.flops for visit in schedule.visits) / HARDWARE.matmul_flops
    assert seconds["cpu"] > compute > 0
    half = replace(costs, hardware=replace(HARDWARE, matmul_flops=5e11))
    slower = busy_seconds(half, schedule, stages=chosen.stages, device="cpu")
    assert slower["cpu"] - seconds["cpu"] == pytest.approx(compute)
    assert chosen.predicted.step_seconds == max(chosen.predicted.seconds.values())
    assert chosen.predicted.seconds[chosen.predicted.bottleneck] == chosen.predicted.step_seconds


def test_compute_is_counted_with_recompute() -> None:
    """Forward once, backward three times (recompute and twice forward), per micro-batch; an embedding is a lookup. What
    is kept is not recomputed."""
    spec, chosen = _all_ssd(clip=None, tied=False)
    per_micro_batch = {stage.index: stage.forward_flops for stage in spec.stages}
    body = sum(flops for index, flops in per_micro_batch.items() if 0 < index < len(spec.stages) - 1)
    expected = 2 * (4 * body + 3 * per_micro_batch[len(spec.stages) - 1])
    assert chosen.predicted.compute_flops == pytest.approx(expected)
    spared = [(), (), (0, 3), (2,), *[()] * (len(spec.stages) - 4)]
    _, swapped = _all_ssd(clip=None, tied=False, kept=tuple(spared))
    spared_flops = OPERATORS[0].flops + OPERATORS[2].flops + OPERATORS[1].flops
    assert swapped.predicted.compute_flops == pytest.approx(expected - 2 * spared_flops)
    assert chosen.predicted.step_flops == 6.0 * spec.parameters * 4 * 64


# ---- evaluations -----------------------------------------------------------------------------------------------------


CUDA = replace(HARDWARE, device="cuda", h2d=2e9, d2h=1e9, h2d_mixed=1.2e9, d2h_mixed=0.7e9)


@examples(20)
@given(data=st.data(), spec=st.one_of(models(), cut_models()), device=st.sampled_from(["cpu", "emulated", "cuda"]))
def test_a_pass_reads_and_computes_what_its_schedule_says(data: st.DataObject, spec: ModelSpec, device: str) -> None:
    hardware = CUDA if device == "cuda" else HARDWARE
    made = plan(spec, hardware, replace(data.draw(request_for(spec, swept=True)), device=device))
    cost = evaluation_cost(spec, hardware, made, rows=[1, made.group.batch_size + 1], times=2, run_seconds=10.0)
    schedule = evaluation_schedule(spec, made)
    assert cost.pass_read <= schedule.traffic.read_total
    assert cost.pass_seconds >= 0.99 * max(cost.pass_read / hardware.store_read, sum(v.flops for v in schedule.visits) / 1e15)
    assert (cost.rows, cost.passes, cost.seconds) == (made.group.batch_size + 2, 3, 3 * cost.pass_seconds)
    assert cost.run_share == pytest.approx(6 * cost.pass_seconds / (10 + 6 * cost.pass_seconds))


@pytest.mark.parametrize("every", [None, 2, 3, 7])
@pytest.mark.parametrize("done", [None, 0, 1, 3, 4, 6])
def test_how_many_are_left(every: int | None, done: int | None) -> None:
    after = [step for step in range((done or 0) + 1, 7) if step == 6 or (every and step % every == 0)]
    assert evaluations_left(every, at_start=True, total=6, done=done) == len(after) + (done is None)
