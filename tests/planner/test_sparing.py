"""What drives are spent for: the rule of `planner/search`, on machines drawn at random and on the case it was made for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.advice.facts import spared_of
from fuyou_cli.advice.planning import plan_recipe
from fuyou_cli.cli.render.plan_screen import spared_in_words
from fuyou_cli.core.units import MiB
from fuyou_cli.machine.described import described
from fuyou_cli.planner.boundary_layout import kept_bytes
from fuyou_cli.planner.place import least_memory
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.search import GAIN, LEAST_WRITTEN, WORTH, Family, RunPlanner, family, search, timed
from fuyou_cli.recipe.load import load_recipe
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec, OperatorSpec
from fuyou_cli.spec.plan import Plan

from .models import HARDWARE, NUMERICS, model, models, parts, request_for

TWENTIETH = 0.05  # of the step: what spending drives has to save
CONFIG = Path(__file__).parents[1] / "engine" / "configs" / "llama-3.1-8b.json"
RECIPE = """version: 1
output_dir: {folder}/out
model: {{name_or_path: {folder}}}
dataset: {{train: [{{path: {folder}/none.jsonl}}], max_seq_len: 4096}}
train: {{epochs: 1, batch_size: 64, micro_batch_size: 1, clip_grad_norm: null}}
"""
WISHES = PlanRequest(
    numerics=replace(NUMERICS, accumulate_dtype="bfloat16", max_seq_len=128),
    model_name="test", device="cpu", clip_grad_norm=None, cpu_budget=0, scratch_size=MiB, lookahead=1, defer=False,
)  # fmt: skip


# ---- the case seen ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSpec, HardwareProfile, PlanRequest]:
    """8B, 64 x 4,096 tokens, 128 GiB, two consumer drives, no clipping, a length that nobody knows."""
    folder = tmp_path_factory.mktemp("8b")
    (folder / "config.json").write_bytes(CONFIG.read_bytes())
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    loaded = load_recipe(folder / "recipe.yaml", ["checkpoint.commit_every_steps=1"])
    planned = plan_recipe(loaded, described("rtx4090,2xgen4,128GiB"), effort="fit", say=print)
    return planned.model, planned.hardware, planned.request


def swapped(model: ModelSpec, plan: Plan) -> int:
    """Bytes of outputs of operators that go to the ssd in a step."""
    micro_batches = plan.numerics.batch_size // plan.numerics.micro_batch_size
    there = (stage for stage in plan.stages if stage.boundary == "ssd")
    return sum(micro_batches * kept_bytes(model.stages[stage.stage], stage.kept) for stage in there)


# ---- what holds of any -----------------------------------------------------------------------------------------------


SLOW = replace(HARDWARE, store_read=4e8, store_write=4e8, store_read_mixed=3e8, store_write_mixed=3e8)
COPYING = replace(SLOW, device="cuda", h2d=1e9, d2h=1e9, matmul_flops=5e11)


@st.composite
def open_cases(draw: st.DrawFn) -> tuple[ModelSpec, HardwareProfile, PlanRequest, Family]:
    """Draws a case with every knob left to the search, a few values of each, and compute so slow that outputs on the ssd may
    pay."""
    spec = draw(models(unit=1 << 20, most=8 << 20, blocks=2))
    hardware = draw(st.sampled_from([HARDWARE, SLOW, COPYING]))
    hardware = replace(hardware, matmul_flops=draw(st.sampled_from([2e8, 2e9, 5e11])))
    request = replace(
        draw(request_for(spec, pinned=False)), device="cuda" if hardware.h2d else "cpu", scratch_size=MiB, kept=None,
        lookahead=1, defer=None, commit_every=draw(st.sampled_from([None, 1, 7, "auto"])),
    )  # fmt: skip
    least = least_memory(spec, hardware, request)
    request = replace(request, cpu_budget=least + draw(st.integers(0, 60)) * 6 * MiB)
    return spec, hardware, request, draw(parts(family(spec, request)))


@examples(15)
@given(open_cases())
def test_what_is_written_costs_a_tenth_of_the_step_at_most(
    case: tuple[ModelSpec, HardwareProfile, PlanRequest, Family],
) -> None:
    """And a plan that is slower than the fastest writes no more."""
    spec, hardware, request, candidates = case
    found = search(spec, hardware, replace(request, wear="spare"), candidates=candidates)
    assert found.fastest.seconds <= found.best.seconds <= found.fastest.seconds * (1 + 2 * WORTH) / (1 - GAIN)
    floor = LEAST_WRITTEN * sum(stage.weight_bytes + stage.state_bytes for stage in spec.stages)
    assert found.best.seconds <= found.fastest.seconds * (1 + GAIN) or found.best.written <= max(floor, found.fastest.written)


def _with_room_for_outputs() -> tuple[ModelSpec, PlanRequest]:
    """Makes a model whose blocks compute one operator nearly alone, and a request with room on the ssd for its outputs."""
    spec = model(8 << 20, *[4 << 20] * 12, 2048, 8 << 20)
    output = OperatorSpec(index=0, name="mm", flops=0.9 * spec.stages[1].forward_flops, bytes=8 * MiB)
    blocks = (replace(stage, operators=(output,) if stage.kind == "block" else ()) for stage in spec.stages)
    spec = replace(spec, stages=tuple(blocks))
    return spec, replace(WISHES, cpu_budget=least_memory(spec, HARDWARE, WISHES) + 60 * MiB, weights="ssd", states="ssd")


def test_spending_needs_a_twentieth() -> None:
    """The same run on compute of several speeds: outputs on the ssd once recomputing them takes long enough, and not before."""
    spec, request = _with_room_for_outputs()
    gains = []
    for power in (6, 10, 10.5, 12):  # at 10.5 spending saves 6 %
        hardware = replace(HARDWARE, matmul_flops=1e10 / 1.5**power)
        found = search(spec, hardware, replace(request, wear="spare"))
        gain = found.best.seconds / found.fastest.seconds - 1
        spent = swapped(spec, found.best.plan) > 0
        assert gain <= 2 * WORTH and not (spent and gain > GAIN)
        gains.append((swapped(spec, found.fastest.plan) > 0, spent))
    assert (True, False) in gains, "worth it only to `ignore`"
    assert (True, True) in gains, "worth it"
    assert (False, True) not in gains


def test_ignoring_wear_writes_what_sparing_does_not() -> None:
    """Where spending saves 1.3 %, outputs go to the ssd if wear is ignored, and only then."""
    spec, request = _with_room_for_outputs()
    hardware = replace(HARDWARE, matmul_flops=1e10 / 1.5**10)
    spared = search(spec, hardware, replace(request, wear="spare")).best
    ignored = search(spec, hardware, replace(request, wear="ignore")).best
    assert ignored.seconds < spared.seconds * (1 - GAIN)
    assert swapped(spec, ignored.plan) > 0 == swapped(spec, spared.plan)


def test_a_length_that_nobody_knows_is_planned_for_the_rates_that_last(
    seen: tuple[ModelSpec, HardwareProfile, PlanRequest],
) -> None:
    """And a run that is known to end within the fast region for those it has there."""
    model, hardware, request = seen
    asked = replace(request, sustained=False)
    made = {steps: RunPlanner(hardware, effort="fit").plan(model, asked, steps=steps) for steps in (0, 1, 1000)}
    assert {steps: one.plan.sustained for steps, one in made.items()} == {0: True, 1: False, 1000: True}


@pytest.mark.slow
def test_what_was_not_done_is_said(seen: tuple[ModelSpec, HardwareProfile, PlanRequest]) -> None:
    """Says it with the figures of the fastest plan that the search has seen."""
    model, hardware, request = seen
    asked = replace(request, clip_grad_norm=1.0, sustained=False)
    found = search(model, hardware, asked)
    said = spared_of(found, timed(found.best, model, hardware, asked), model, hardware, asked)
    other = timed(found.fastest, model, hardware, asked)
    chosen = timed(found.best, model, hardware, asked).predicted
    assert said is not None
    assert said.per_step == other.predicted.written_per_step - chosen.written_per_step > 0
    assert 0 < said.faster == chosen.step_seconds / other.predicted.step_seconds - 1 < TWENTIETH
    assert f"offload.wear=ignore writes it and is {said.faster:.1%} faster" in spared_in_words(said)
    ignoring = search(model, hardware, replace(asked, wear="ignore"))
    assert spared_of(ignoring, other, model, hardware, asked) is None
