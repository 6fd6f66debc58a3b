"""Which moves the search finds: several sweeps, fewer copies, the norm first, updates in the next forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.core.errors import PlanError
from fuyou_cli.core.units import GiB, MiB
from fuyou_cli.planner.place import Candidate, least_memory, made_of, sweep_counts
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.search import GAIN, WORTH, family, search, timed
from fuyou_cli.planner.simulate import simulate
from fuyou_cli.spec.hardware import HardwareProfile
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
        numerics=numerics, model_name="tiny", device="cpu", clip_grad_norm=1.0, cpu_budget=0, scratch_size=MiB, kept="none",
        free_pages=True,
    )  # fmt: skip
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


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (replace(SPEC, may_sweep=False), {}),
        (SPEC, {"sweeps": 1}),
        (SPEC, {"numerics": replace(LARGE_BATCH, micro_batch_size=48)}),
    ],
    ids=["another model", "asked for", "one micro-batch"],
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
@given(data=st.data(), spec=models(blocks=2))
def test_more_choices_are_never_slower_without_fewer_writes(data: st.DataObject, spec: ModelSpec) -> None:
    spec = replace(spec, may_sweep=not spec.tied_head)
    request = replace(data.draw(request_for(spec, pinned=False)), wear=data.draw(st.sampled_from(["spare", "ignore"])))
    micro_batches = data.draw(st.sampled_from([2, 2, 4, 4, 6, 16]))  # numbers of sweeps are their divisors, and each costs
    numerics = replace(request.numerics, batch_size=micro_batches * request.numerics.micro_batch_size)
    request = replace(request, numerics=numerics)
    request = replace(
        request, cpu_budget=least_memory(spec, HARDWARE, replace(request, sweeps=1)) + data.draw(st.integers(0, 300)) * MiB
    )
    candidates = data.draw(parts(family(spec, request)))
    found = search(spec, HARDWARE, request, candidates=candidates)
    narrower = data.draw(st.sampled_from([{"sweeps": 1, "norm_first": False}, {"norm_first": False}]))
    one = search(spec, HARDWARE, replace(request, **narrower), candidates=candidates)
    seconds, written = one.best.seconds, one.best.written
    if request.wear == "ignore" or found.best.written >= written:
        assert found.best.seconds <= seconds * (1 + GAIN)
    assert found.best.seconds <= seconds * (1 + 2 * WORTH + GAIN)
    assert found.best.plan.predicted.cpu_peak <= request.cpu_budget


def test_sweeps_that_write_less_and_take_no_longer_spare_the_drives() -> None:
    request = replace(_request(), cpu_budget=_request().cpu_budget + 240 * MiB)
    spared = search(SPEC, HARDWARE, request).best
    one = search(SPEC, HARDWARE, replace(request, sweeps=1, wear="ignore")).best
    assert spared.candidate.sweeps > 1
    assert spared.plan.predicted.written_per_step == 0 < one.plan.predicted.written_per_step
    assert spared.seconds <= one.seconds * (1 + GAIN)


def test_a_batch_that_fits_only_in_parts_is_planned_in_sweeps() -> None:
    request = replace(_request(), boundaries="cpu")
    least = least_memory(SPEC, HARDWARE, request)
    assert least < least_memory(SPEC, HARDWARE, replace(request, sweeps=1)) - 100 * MiB
    request = replace(request, cpu_budget=least)
    best = search(SPEC, HARDWARE, request).best
    plan = timed(best, SPEC, HARDWARE, request)
    assert plan.sweeps == best.candidate.sweeps > 1 and plan.predicted.cpu_peak <= least
    with pytest.raises(PlanError, match="needs at least"):
        search(SPEC, HARDWARE, replace(request, cpu_budget=least - MiB))


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


def _of_13b() -> tuple[ModelSpec, HardwareProfile, PlanRequest]:
    """Makes ten blocks of a 13B GPT-2 with its operators, a card of 24 GiB and 21 GB/s each way, and RAM for everything."""
    hidden, numerics = 5120, replace(NUMERICS, batch_size=32, micro_batch_size=8, max_seq_len=1024)
    tokens = numerics.micro_batch_tokens
    attention, unit = 2 * numerics.max_seq_len * hidden, 2 * hidden * tokens
    flops = {"qkv": (3, 6 * hidden**2), "attention": (1, attention), "proj": (1, 2 * hidden**2), "fc": (4, 8 * hidden**2)}
    operators = tuple(
        OperatorSpec(index=index, name=name, flops=each * tokens, bytes=units * unit)
        for index, (name, (units, each)) in enumerate(flops.items())
    )
    whole = dict(forward_flops=(24 * hidden**2 + attention) * tokens, forward_peak=6 * unit, backward_peak=20 * unit)
    words = 50_176 * hidden
    spec = model(words, *[12 * hidden**2] * 10, 1 << 13, words, hidden=hidden)
    stages = tuple(replace(one, operators=operators, **whole) if one.kind == "block" else one for one in spec.stages)
    card = replace(HARDWARE, device="cuda", matmul_flops=162e12, h2d=21e9, d2h=21e9, adamw=((1, 2.5e11),))
    request = PlanRequest(
        numerics=numerics, model_name="13b", device="cuda", clip_grad_norm=1.0, cpu_budget=1 << 40, scratch_size=MiB,
        gpu_budget=24 * GiB, kept_there=((),) * len(stages),
    )  # fmt: skip
    return replace(spec, stages=stages), card, request


def test_where_copies_bind_fewer_outputs_are_copied() -> None:
    """Copying all takes longer than forward computes. The small output that saves as much per byte as the large ones is left
    out in most blocks, instead of all in some: each block waits for its own copies."""
    spec, card, request = _of_13b()
    found = search(spec, card, request)
    best, candidate = found.best, found.best.candidate
    kept = [stage.kept for stage in best.plan.stages if spec.stages[stage.stage].kind == "block"]
    assert candidate.copied < 1 and set(kept) == {(0, 3), (0, 2, 3)}
    whole = made_of(spec, card, request, replace(candidate, copied=1.0))
    assert whole is not None
    assert best.seconds < 0.98 * simulate(spec, card, whole, plan_schedule(spec, whole), jobs=False).step_seconds


def _bound_by_drives(spare: int) -> tuple[HardwareProfile, PlanRequest]:
    """Makes a machine whose drives bind, and a request with so many MiB of RAM beyond the least."""
    rates = {name: getattr(HARDWARE, name) / 4 for name in STORE}
    hardware = replace(HARDWARE, matmul_flops=100 * HARDWARE.matmul_flops, cores=16, **rates)
    request = replace(_request(replace(NUMERICS, accumulate_dtype="float32")), sweeps=1)
    return hardware, replace(request, cpu_budget=least_memory(SPEC, hardware, request) + spare * MiB)


def test_where_the_store_binds_the_norm_is_measured_first() -> None:
    """Gradients then leave RAM to states, which are written less. `never` leaves all as it was."""
    hardware, request = _bound_by_drives(48)
    waits, found = search(SPEC, hardware, replace(request, norm_first=False)), search(SPEC, hardware, request)
    assert found.best.candidate.norm_first and found.best.seconds < 0.95 * waits.best.seconds
    plan = timed(found.best, SPEC, hardware, request)
    assert plan.norm_first and plan.predicted.cpu_peak <= request.cpu_budget
    assert plan.predicted.written_per_step < waits.best.plan.predicted.written_per_step
    assert plan.predicted.compute_flops > waits.best.plan.predicted.compute_flops


@pytest.mark.parametrize("spare", [40, 48])
def test_measuring_first_fills_ram_in_the_best_order(spare: int) -> None:
    """Which is another one than that of the plan whose updates wait: no gradients take RAM."""
    hardware, request = _bound_by_drives(spare)
    waits = search(SPEC, hardware, replace(request, norm_first=False)).best.candidate
    found = search(SPEC, hardware, request).best
    steps = {
        states: _step(hardware, request, replace(found.candidate, states=states)) for states in family(SPEC, request).states
    }
    assert found.candidate.norm_first
    assert found.seconds < steps[waits.states] * (1 - GAIN)
    assert found.seconds <= min(steps.values()) * (1 + GAIN)


def test_measuring_first_takes_a_larger_pipeline_where_that_is_faster() -> None:
    hardware, request = _bound_by_drives(112)
    waits = search(SPEC, hardware, replace(request, norm_first=False)).best.candidate
    found = search(SPEC, hardware, request).best
    assert found.candidate.norm_first
    assert (found.candidate.lookahead, found.candidate.gradient_slots) > (waits.lookahead, waits.gradient_slots)
    same = replace(found.candidate, lookahead=waits.lookahead, gradient_slots=waits.gradient_slots)
    assert found.seconds < _step(hardware, request, same) * (1 - GAIN)


def _step(hardware: HardwareProfile, request: PlanRequest, candidate: Candidate) -> float:
    plan = made_of(SPEC, hardware, request, candidate)
    assert plan is not None
    return simulate(SPEC, hardware, plan, plan_schedule(SPEC, plan), jobs=False).step_seconds
