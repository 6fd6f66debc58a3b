"""Memory over a simulated step: never more of a kind than the plan's line for it, and what is certain to be used is."""

from __future__ import annotations

from dataclasses import replace

from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.planner.place import plan
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.simulate import simulate
from fuyou_cli.planner.timeline import Timeline
from fuyou_cli.planner.wishes import Wishes
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan, Tier

from .models import HARDWARE, cut_models, models, wishes_for

COPYING = replace(HARDWARE, device="cuda", h2d=2e9, d2h=1e9)
TIERS: tuple[Tier, ...] = ("gpu", "cpu", "ssd")
specs = st.one_of(models(), cut_models())


def held(spec: ModelSpec, wishes: Wishes) -> tuple[Plan, Timeline]:
    hardware = COPYING if wishes.device == "cuda" else HARDWARE
    made = plan(spec, hardware, wishes)
    return made, simulate(spec, hardware, made, plan_schedule(spec, made), memory=True)


@examples(80)
@given(data=st.data(), spec=specs, device=st.sampled_from(["cpu", "emulated", "cuda"]))
def test_no_kind_exceeds_its_line(data: st.DataObject, spec: ModelSpec, device: str) -> None:
    made, step = held(spec, replace(data.draw(wishes_for(spec)), device=device))
    lines = {(line.tier, line.what): line.size for line in made.memory}
    peaks: dict[tuple[Tier, str], int] = {}
    for moment in step.memory:
        for key, size in moment.held.items():
            assert 0 <= size <= lines.get(key, 0), (key, moment.at)
            peaks[key] = max(peaks.get(key, 0), size)
    constant = [key for key in lines if key[1] in ("process", "optimizer states") or key == ("ssd", "weights")]
    for key in (*constant, ("cpu", "compute")):  # the hungriest visit comes once a step
        assert peaks.get(key, 0) == lines.get(key, 0), key
    kept = sum(stage.boundary_ram.size for stage in made.stages if stage.boundary_ram)
    assert peaks.get(("cpu", "boundaries"), 0) >= kept  # all of them exist when forward ends
    highest = step.peak("cpu")
    assert highest is not None and highest.total("cpu") <= made.predicted.cpu_peaks["train"]
    for tier in TIERS:
        planned = sum(line.size for line in made.memory if line.tier == tier)
        assert all(moment.total(tier) <= planned for moment in step.memory)


@examples(30)
@given(data=st.data(), spec=specs)
def test_with_everything_at_home_all_of_it_is_used(data: st.DataObject, spec: ModelSpec) -> None:
    at_home = dict(weights="cpu", states="cpu", gradients="cpu", boundaries="cpu", clip_grad_norm=1.0, defer=None)
    made, step = held(spec, replace(data.draw(wishes_for(spec)), device="cpu", **at_home))
    lines = {line.what: line.size for line in made.memory if line.tier == "cpu"}
    for what in ("weights", "optimizer states", "gradients", "boundaries", "compute", "update chunks", "process"):
        assert max(moment.held.get(("cpu", what), 0) for moment in step.memory) == lines.get(what, 0), what


@examples(25)
@given(data=st.data(), spec=specs)
def test_looking_changes_nothing(data: st.DataObject, spec: ModelSpec) -> None:
    wishes = data.draw(wishes_for(spec))
    made, step = held(spec, wishes)
    unseen = simulate(spec, HARDWARE, made, plan_schedule(spec, made))
    assert unseen.memory == () and replace(step, memory=()) == unseen  # and a search does not look
    assert step.memory[0].at == step.begin
    assert all(one.at < other.at and one.held != other.held for one, other in zip(step.memory, step.memory[1:], strict=False))
    assert step.memory[-1].at <= step.begin + step.step_seconds
