"""Simulated steps of models drawn at random: they end, take at least what their busiest resource takes, and move the bytes
that the schedule says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.planner.bound import lower_bound, store_seconds
from fuyou_cli.planner.costs import Costs
from fuyou_cli.planner.device import BOUNDARIES_ACROSS, GRADIENTS_ACROSS, WEIGHTS_UP
from fuyou_cli.planner.place import least_memory, plan
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.simulate import Timeline, simulate
from fuyou_cli.spec.hardware import HardwareProfile
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan

from .models import HARDWARE, cut_models, model, models, request, request_for

COPYING = replace(HARDWARE, device="cuda", h2d=2e9, d2h=1e9, h2d_mixed=1.2e9, d2h_mixed=0.7e9)
SHARED = replace(HARDWARE, shared_compute=0.5, shared_adamw=0.5)
DEAR_TRANSFERS = replace(SHARED, io_cpu=1e-10)
CLOSE = 5e-4  # how near the simulated rates of a drive that reads and writes at once are to where they settle
LATER = (30, 300)  # steps
STEADY = 8  # steps, after which the updates that a step leaves to the next are always the same

FEW = st.sampled_from([3, 3, 3, 12])  # blocks at most: a step of few has all that one of many has, in a third of the time
specs = FEW.flatmap(lambda blocks: st.one_of(models(blocks=blocks), cut_models(blocks=blocks)))


def _simulated(spec: ModelSpec, hardware: HardwareProfile, request: PlanRequest, steps: int = 3) -> tuple[Plan, Timeline]:
    made = plan(spec, hardware, request)
    return made, simulate(spec, hardware, made, plan_schedule(spec, made), steps=steps)


@examples(40)
@given(data=st.data(), spec=specs, device=st.sampled_from(["cpu", "emulated", "cuda"]))
def test_a_step_takes_at_least_its_busiest_resource(data: st.DataObject, spec: ModelSpec, device: str) -> None:
    request = replace(data.draw(request_for(spec, swept=True)), device=device)
    made, step = _simulated(spec, COPYING if device == "cuda" else SHARED, request)
    assert 0 <= step.forward_seconds <= step.step_seconds
    assert all(seconds <= step.step_seconds * (1 + 1e-9) for seconds in step.in_use.values())
    assert step.written == made.predicted.written_per_step
    assert step.read <= made.predicted.read_per_step  # weights may still be there from an update when they are wanted again
    hardware = COPYING if device == "cuda" else SHARED
    busy = made.predicted.seconds | store_seconds(hardware, step.read, step.written)
    least = max(lower_bound(Costs.of(spec, hardware, made), plan_schedule(spec, made), made), *busy.values())
    most = step.step_seconds
    for steps in LATER:  # each step may leave more updates to the next, until no slot is free
        if least > most * (1 + CLOSE) + 1e-9:
            most = simulate(spec, hardware, made, plan_schedule(spec, made), steps=steps).step_seconds
    assert least <= most * (1 + CLOSE) + 1e-9, busy


@examples(15)
@given(data=st.data(), spec=specs, device=st.sampled_from(["cpu", "cuda"]), dram=st.floats(1e9, 1e10))
def test_a_step_takes_at_least_what_the_hosts_memory_takes(
    data: st.DataObject, spec: ModelSpec, device: str, dram: float
) -> None:
    """All bytes of drives, copies and AdamW pass through it, and the closed form counts the same ones. A memory that is never
    full changes nothing. One that is full may even make a step shorter, as it changes the order of jobs: 6 % in a toy that
    writes boundaries."""
    hardware = replace(COPYING if device == "cuda" else SHARED, dram=dram)
    request = replace(data.draw(request_for(spec, swept=True, most=3)), device=device)
    made, step = _simulated(spec, hardware, request, steps=STEADY)
    before = simulate(spec, hardware, made, plan_schedule(spec, made), steps=STEADY - 1)
    used, read = before.in_use["dram"] + step.in_use["dram"], before.read + step.read
    counted = 2 * made.predicted.seconds["dram"] - (2 * made.predicted.read_per_step - read) / dram
    assert step.in_use["dram"] <= step.step_seconds * (1 + 1e-9)
    assert used <= counted * (1 + 1e-9)  # steps may alternate: one moves what the one before has asked for
    if not spec.tied_head:  # whose sums of gradients may stay on the device
        assert used == pytest.approx(counted, rel=1e-6)
    free, unknown = (
        simulate(spec, replace(hardware, dram=rate), made, plan_schedule(spec, made), steps=STEADY) for rate in (1e15, 0.0)
    )
    assert (free.step_seconds, free.stalls) == (unknown.step_seconds, unknown.stalls)


@examples(40)
@given(data=st.data(), spec=specs, device=st.sampled_from(["cpu", "emulated", "cuda"]), h2d=st.floats(1e7, 1e11))
def test_every_second_of_a_step_is_compute_or_a_wait_with_a_name(
    data: st.DataObject, spec: ModelSpec, device: str, h2d: float
) -> None:
    hardware = DEAR_TRANSFERS if device == "cpu" else replace(COPYING, h2d=h2d, d2h=h2d / 2)
    _, step = _simulated(spec, hardware, replace(data.draw(request_for(spec, swept=True)), device=device))
    assert step.under_way["compute"] + sum(step.stalls.values()) == pytest.approx(step.step_seconds, rel=1e-6)
    if device == "cpu":
        assert not {WEIGHTS_UP, BOUNDARIES_ACROSS, GRADIENTS_ACROSS} & set(step.stalls)
    elif h2d < 1e8:  # slower than any disk
        assert max(step.stalls, key=lambda cause: step.stalls[cause]) in (WEIGHTS_UP, BOUNDARIES_ACROSS, GRADIENTS_ACROSS)


def test_drives_do_not_wait_for_updates_in_ram() -> None:
    """Every second stage has its states on the ssd. Drives and update threads are then both busy all the time but the ends."""
    spec = model(*[1 << 20] * 12, 1 << 11, 1 << 20)
    hardware = replace(HARDWARE, h2d=1e11, d2h=1e11, adamw=((1, 4e9),), device_memory_rate=1e12)
    homes: Any = dict.fromkeys(("weights", "gradients", "boundaries"), "cpu")
    asked = request(device="cuda", gpu_budget=8 << 30, batch_on_device=True, lookahead=2, **homes)
    made, step = _simulated(spec, hardware, replace(asked, cpu_budget=least_memory(spec, hardware, asked) + (60 << 20)))
    assert {stage.states for stage in made.stages} == {"cpu", "ssd"}
    longest = max(made.predicted.seconds.values())
    assert made.predicted.seconds["ssd write"] > 0.8 * longest
    assert step.step_seconds < 1.1 * longest


def test_no_later_update_keeps_a_slot_for_gradients_from_backward() -> None:
    """The drives take about as long for an update as the device computes. If the newest update went first, the one before would
    free its slot a whole update later, and a step would take 1.48 of its compute."""
    spec = model(*[1 << 20] * 12, 1 << 11, 1 << 20)
    hardware = replace(HARDWARE, h2d=1e11, d2h=1e11, adamw=((1, 4e9),), device_memory_rate=1e12, matmul_flops=9e8)
    asked = request(device="cuda", gpu_budget=8 << 30, batch_on_device=True, weights="ssd", states="ssd", boundaries="cpu")
    made, step = _simulated(spec, hardware, replace(asked, lookahead=1, sweeps=1, cpu_budget=1 << 40))
    seconds = made.predicted.seconds
    assert seconds["ssd write"] > 0.5 * seconds["compute"]
    assert step.step_seconds < 1.25 * seconds["compute"]


@examples(15)
@given(data=st.data(), spec=specs)
def test_the_same_inputs_give_the_same_timeline(data: st.DataObject, spec: ModelSpec) -> None:
    request = data.draw(request_for(spec, swept=True))
    assert _simulated(spec, DEAR_TRANSFERS, request)[1] == _simulated(spec, DEAR_TRANSFERS, request)[1]


@examples(15)
@given(data=st.data(), spec=specs, factor=st.sampled_from([0.25, 4.0]))
def test_time_scales_with_the_machine(data: st.DataObject, spec: ModelSpec, factor: float) -> None:
    """A machine that is slower in everything takes that much longer, and nothing else changes."""
    request = data.draw(request_for(spec, swept=True, most=3))
    rates = ("matmul_flops", "store_read", "store_write", "store_read_mixed", "store_write_mixed")
    slower = replace(
        DEAR_TRANSFERS, **{name: getattr(DEAR_TRANSFERS, name) / factor for name in rates},
        io_cpu=DEAR_TRANSFERS.io_cpu * factor,
        adamw=tuple((threads, rate / factor) for threads, rate in DEAR_TRANSFERS.adamw),
    )  # fmt: skip
    one, other = _simulated(spec, DEAR_TRANSFERS, request)[1], _simulated(spec, slower, request)[1]
    assert other.step_seconds == pytest.approx(factor * one.step_seconds, rel=1e-6)
