"""Tests what requests leave of a machine: update threads of its cores, and room on its disk and device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drawn import every
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.planner.plan_request import MOST_UPDATE_THREADS, NEARLY_BEST, update_chunks_for, update_threads_for
from fuyou_cli.planner.search import fastest
from fuyou_cli.spec.hardware import HardwareProfile

from .models import HARDWARE, SPEC, request

RATES = ((1, 12e9), (2, 24e9), (4, 40e9), (8, 55e9), (16, 56e9))
DESKTOP = replace(HARDWARE, cores=16, adamw=RATES)


@pytest.mark.parametrize(
    ("machine", "device", "torch_threads", "threads"),
    [
        (DESKTOP, "cuda", 16, 8),  # twice as many bring 2 % more
        (replace(DESKTOP, cores=8), "cuda", 8, 4),  # one core feeds the GPU
        (replace(DESKTOP, cores=1), "cuda", 1, 1),
        (DESKTOP, "cpu", 16, 1),  # shares the cores with compute
        (DESKTOP, "emulated", 16, 1),
        (DESKTOP, "cpu", 12, 4),
        (replace(DESKTOP, adamw=()), "cuda", 16, 1),
        (replace(DESKTOP, adamw=((1, 0.0),)), "cuda", 16, 1),
        (replace(DESKTOP, cores=256, adamw=((1, 1e9), (128, 1e11))), "cuda", 256, 1),  # more than there can be
    ],
)
def test_threads(machine: HardwareProfile, device: str, torch_threads: int, threads: int) -> None:
    assert update_threads_for(machine, device=device, torch_threads=torch_threads) == threads


@given(
    st.lists(st.tuples(st.integers(1, 128), st.floats(1e8, 1e11)), unique_by=lambda rate: rate[0]).map(sorted),
    st.integers(1, 128),
    st.sampled_from(["cpu", "cuda"]),
    st.integers(1, 128),
)
def test_never_more_than_are_free_nor_than_help(rates: list, cores: int, device: str, torch_threads: int) -> None:
    machine = replace(HARDWARE, cores=cores, adamw=tuple(rates))
    threads = update_threads_for(machine, device=device, torch_threads=torch_threads)
    assert 1 <= threads <= max(1, min(MOST_UPDATE_THREADS, cores - (device == "cuda" or torch_threads)))
    usable = {count: rate for count, rate in rates if count <= cores - (device == "cuda" or torch_threads)}
    fewer = [rate for count, rate in usable.items() if count < threads]
    assert all(rate < NEARLY_BEST * max(usable.values()) for rate in fewer)
    assert update_chunks_for(threads) > threads


@pytest.mark.parametrize(
    ("limits", "room"),
    every(
        2,
        [
            ({}, True),
            ({"ssd_budget": 0}, True),  # bytes less than the plan takes
            ({"ssd_budget": 1}, False),
            ({"gpu_budget": 0}, True),
            ({"gpu_budget": 1}, False),
            ({"gpu_budget": 0, "ssd_budget": 1}, False),
        ],
    ),
)
def test_a_plan_has_room_on_disk_and_device(limits: dict[str, int], room: bool) -> None:
    free = request(weights="ssd", states="ssd")
    found = fastest(SPEC, HARDWARE, free)
    plan = replace(found, predicted=replace(found.predicted, gpu_peak=1 << 30))
    there = {"ssd_budget": plan.store_size, "gpu_budget": 1 << 30}
    asked = replace(free, **{key: there[key] - less for key, less in limits.items()})
    assert asked.has_room_for(plan, HARDWARE) == room


def test_the_disk_is_what_the_run_may_have_of_it_where_that_is_known() -> None:
    plan = fastest(SPEC, HARDWARE, request(weights="ssd", states="ssd"))
    full = replace(HARDWARE, disk_free=plan.store_size - 1)
    assert not request().has_room_for(plan, full)
    assert request(ssd_budget=plan.store_size).has_room_for(plan, full)  # what an earlier run left there is taken over
