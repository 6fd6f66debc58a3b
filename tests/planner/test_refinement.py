"""The planner takes several sweeps where the simulated step is shorter, and looks for them within a fixed amount of work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.advice.plan_files import KeptPlan, from_text, plan_file, to_text
from fuyou_cli.core.errors import PlanError, UsageError
from fuyou_cli.core.units import MiB
from fuyou_cli.planner.candidate import family, sweep_counts
from fuyou_cli.planner.place import least_memory
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.refinement import MOST_REFINED_VISITS
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.search import search, timed
from fuyou_cli.planner.search_state import GAIN
from fuyou_cli.planner.simulate import simulate
from fuyou_cli.planner.sparing import WORTH, seconds_and_bytes
from fuyou_cli.spec.model import ModelSpec, OperatorSpec
from fuyou_cli.spec.plan import Numerics

from .models import HARDWARE, NUMERICS, model, models, parts, request_for

UNIT = 1 << 20
STORE = ("store_read", "store_write", "store_read_mixed", "store_write_mixed")
SPEC = replace(model(UNIT, *[UNIT] * 8, 1 << 11, UNIT), may_sweep=True)
LARGE_BATCH = replace(NUMERICS, batch_size=48, micro_batch_size=1, max_seq_len=512)  # 48 MiB a boundary, nine of them


def _request(numerics: Numerics = LARGE_BATCH) -> PlanRequest:
    """Makes a request with room in RAM for a part of the boundaries."""
    asked = PlanRequest(
        numerics=numerics, model_name="tiny", device="cpu", clip_grad_norm=1.0, cpu_budget=0, scratch_size=MiB, kept="none"
    )
    return replace(asked, cpu_budget=least_memory(SPEC, HARDWARE, replace(asked, sweeps=1)) + 160 * MiB)


def test_boundaries_that_have_no_room_are_worth_sweeps() -> None:
    request = _request()
    one, found = search(SPEC, HARDWARE, replace(request, sweeps=1)), search(SPEC, HARDWARE, request)
    plan = timed(found.best, SPEC, HARDWARE, request)
    assert plan.sweeps == found.best.candidate.sweeps > 1
    assert found.fastest.seconds <= found.best.seconds < one.best.seconds
    assert plan.predicted.step_seconds == pytest.approx(simulate(SPEC, HARDWARE, plan, plan_schedule(SPEC, plan)).step_seconds)
    assert plan.predicted.cpu_peak <= request.cpu_budget
    boundaries = [sum(alternative.plan.predicted.written_by["boundaries"] for alternative in (f.best,)) for f in (one, found)]
    assert boundaries[1] < boundaries[0]
    assert any(alternative.candidate == one.best.candidate for alternative in found.others)


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (replace(SPEC, may_sweep=False), {}),
        (SPEC, {"sweeps": 1}),
        (SPEC, {"store_mode": "redo", "gradients": "ssd"}),
        (SPEC, {"numerics": replace(LARGE_BATCH, micro_batch_size=48)}),
    ],
    ids=["another model", "asked for", "redo", "one micro-batch"],
)
def test_one_sweep_where_no_other_is_open(spec: ModelSpec, changes: dict[str, object]) -> None:
    request = replace(_request(), **changes)  # type: ignore[arg-type]
    assert sweep_counts(spec, request) == (1,)
    found = search(spec, HARDWARE, replace(request, cpu_budget=1 << 33))
    assert found.best.plan.sweeps == 1


def test_each_number_is_at_least_twice_the_one_before() -> None:
    assert sweep_counts(SPEC, _request()) == (1, 2, 4, 8, 16, 48)
    assert sweep_counts(SPEC, _request(replace(LARGE_BATCH, batch_size=45))) == (1, 3, 9, 45)


@examples(12)
@given(data=st.data(), spec=models(blocks=4))
def test_never_slower_without_fewer_writes_never_more_written_and_bounded(data: st.DataObject, spec: ModelSpec) -> None:
    spec = replace(spec, may_sweep=not spec.tied_head)
    request = replace(data.draw(request_for(spec, pinned=False)), wear=data.draw(st.sampled_from(["spare", "ignore"])))
    numerics = replace(request.numerics, batch_size=16 * request.numerics.micro_batch_size)
    request = replace(request, numerics=numerics)
    request = replace(
        request, cpu_budget=least_memory(spec, HARDWARE, replace(request, sweeps=1)) + data.draw(st.integers(0, 300)) * MiB
    )
    candidates = data.draw(parts(family(spec, request)))
    for narrower in ({"sweeps": 1, "norm_first": False}, {"norm_first": False}):
        one = search(spec, HARDWARE, replace(request, **narrower), effort="limited", candidates=candidates)
        found = search(spec, HARDWARE, request, effort="limited", candidates=candidates)
        if request.wear == "ignore":
            assert found.best.seconds <= one.best.seconds
        else:
            longest = max(one.best.seconds, found.fastest.seconds * (1 + WORTH))
            assert found.best.seconds <= longest
            assert found.best.seconds < one.best.seconds or seconds_and_bytes(found.best) <= seconds_and_bytes(one.best)
        assert found.visits - one.visits <= 1.5 * MOST_REFINED_VISITS
        if request.wear != "ignore":
            assert found.best.plan.predicted.written_per_step <= one.best.plan.predicted.written_per_step
        assert found.best.plan.predicted.cpu_peak <= request.cpu_budget


def test_sweeps_that_write_less_and_take_no_longer_spare_the_drives() -> None:
    request = replace(_request(), cpu_budget=_request().cpu_budget + 240 * MiB)
    spared, fastest = (search(SPEC, HARDWARE, replace(request, wear=wear)).best for wear in ("spare", "ignore"))
    assert (spared.candidate.sweeps, fastest.candidate.sweeps) == (2, 1)
    assert spared.plan.predicted.written_per_step == 0 < fastest.plan.predicted.written_per_step
    assert spared.seconds <= fastest.seconds * (1 + GAIN)


def test_a_batch_that_fits_only_in_parts_is_planned_in_sweeps() -> None:
    request = replace(_request(), boundaries="cpu")
    least = least_memory(SPEC, HARDWARE, request)
    assert least < least_memory(SPEC, HARDWARE, replace(request, sweeps=1)) - 100 * MiB
    request = replace(request, cpu_budget=least)
    best = search(SPEC, HARDWARE, request).best
    plan = timed(best, SPEC, HARDWARE, request)
    assert plan.sweeps == best.candidate.sweeps > 1 and plan.predicted.cpu_peak <= least
    text = to_text(plan_file(plan, SPEC, HARDWARE.process_bytes, request, best.candidate))
    assert KeptPlan(Path("plan.json"), from_text(text))(SPEC, HARDWARE, request) == plan
    with pytest.raises(PlanError, match="needs at least"):
        search(SPEC, HARDWARE, replace(request, cpu_budget=least - MiB))


def test_a_plan_file_keeps_the_sweeps() -> None:
    request = _request()
    best = search(SPEC, HARDWARE, request).best
    plan = timed(best, SPEC, HARDWARE, request)
    text = to_text(plan_file(plan, SPEC, HARDWARE.process_bytes, request, best.candidate))
    assert KeptPlan(Path("plan.json"), from_text(text))(SPEC, HARDWARE, request) == plan


@pytest.mark.parametrize(("saved", "frozen", "keeps"), [(0.01, 0.0, True), (0.01, 0.9, False), (0.6, 0.9, True)])
def test_a_processor_with_frozen_weights_keeps_no_outputs_for_little(saved: float, frozen: float, keeps: bool) -> None:
    """Outputs cost no RAM to speak of, and save this share of a block's forward."""
    blocks = (
        replace(
            stage,
            operators=(OperatorSpec(index=0, name="mm", flops=saved * stage.forward_flops, bytes=4096),),
            frozen_flops=frozen * stage.forward_flops,
        )
        if stage.kind == "block"
        else stage
        for stage in SPEC.stages
    )
    spec = replace(SPEC, stages=tuple(blocks))
    slow = replace(HARDWARE, matmul_flops=1e9)
    request = replace(_request(), kept=None, cpu_budget=1 << 33)
    assert any(stage.kept for stage in search(spec, slow, request).best.plan.stages) == keeps


def test_where_the_store_binds_the_norm_is_measured_first() -> None:
    """Gradients then leave RAM to states, which are written less. `never` leaves all as it was."""
    rates = {name: getattr(HARDWARE, name) / 4 for name in STORE}
    hardware = replace(HARDWARE, matmul_flops=100 * HARDWARE.matmul_flops, cores=16, **rates)
    request = replace(_request(replace(NUMERICS, accumulate_dtype="float32")), sweeps=1)
    request = replace(request, cpu_budget=least_memory(SPEC, hardware, request) + 48 * MiB)
    waits, found = search(SPEC, hardware, replace(request, norm_first=False)), search(SPEC, hardware, request)
    assert found.best.candidate.norm_first and found.best.seconds < 0.95 * waits.best.seconds
    plan = timed(found.best, SPEC, hardware, request)
    assert plan.norm_first and plan.predicted.cpu_peak <= request.cpu_budget
    assert plan.predicted.written_per_step < waits.best.plan.predicted.written_per_step
    assert plan.predicted.compute_flops > waits.best.plan.predicted.compute_flops
    text = to_text(plan_file(plan, SPEC, hardware.process_bytes, request, found.best.candidate))
    assert KeptPlan(Path("plan.json"), from_text(text))(SPEC, hardware, request) == plan
    with pytest.raises(UsageError, match="gradients"):
        KeptPlan(Path("plan.json"), from_text(text))(SPEC, hardware, replace(request, gradients="ssd"))
