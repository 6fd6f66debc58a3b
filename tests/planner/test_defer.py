"""Tests what updates that wait for the next forward move."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.planner.place import plan
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.spec.model import ITEM_SIZE, ModelSpec

from .models import HARDWARE, NUMERICS, cut_models, model, models, request_for, with_budget
from .test_place import ROOMY, assert_apart, in_arena, in_store, least

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
