"""Tests what a profile answers about a stage, its update and itself, and what a request leaves of a machine: update threads of
its cores, and room on its disk and device."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from drawn import every
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.planner.plan_request import MOST_UPDATE_THREADS, NEARLY_BEST, update_chunks_for, update_threads_for
from fuyou_cli.planner.search import fastest
from fuyou_cli.spec.hardware import Drive, HardwareProfile, RatedKind, StageRate, merged_rates, with_measured_graphs
from fuyou_cli.spec.model import Dtype

from .models import HARDWARE, SPEC, request, with_graphs


def rate(
    params: int, tokens: int, *, kind: RatedKind = "block", dtype: Dtype = "bfloat16", hidden: int = 1024, forward: float = 1e12
) -> StageRate:
    return StageRate(kind=kind, dtype=dtype, hidden=hidden, params=params, tokens=tokens, forward=forward, backward=forward / 2)


RATES = (
    rate(10_000_000, 512, forward=1e12),
    rate(10_000_000, 2048, forward=2e12),
    rate(200_000_000, 512, hidden=4096, forward=3e12),
    rate(200_000_000, 512, hidden=4096, dtype="float32", forward=4e12),
    rate(60_000_000, 512, hidden=4096, kind="head", forward=5e12),
)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (("block", "bfloat16", 4096, 200_000_000, 512), 3e12),  # just that
        (("block", "bfloat16", 1024, 10_000_000, 600), 1e12),  # the parameters are, 512 is nearer than 2048
        (("block", "bfloat16", 1024, 10_000_000, 1100), 2e12),  # by the ratio: 1100 is nearer to 2048
        (("block", "bfloat16", 2048, 44_000_000, 2048), 2e12),  # geometric middle of 10 M and 200 M: 44.7 M
        (("block", "bfloat16", 2048, 46_000_000, 2048), 3e12),  # parameters before tokens
        (("block", "float32", 1024, 10_000_000, 512), 4e12),  # never of another dtype
        (("head", "bfloat16", 1024, 10_000_000, 512), 5e12),  # never of another kind
        (("head", "float32", 1024, 10_000_000, 512), HARDWARE.matmul_flops),
    ],
)
def test_the_nearest_rate(asked: tuple[RatedKind, Dtype, int, int, int], found: float) -> None:
    for seed in range(5):  # in whatever order they were measured
        shuffled = random.Random(seed).sample(RATES, len(RATES))
        assert replace(HARDWARE, stage_rates=tuple(shuffled)).stage_rate(*asked).forward == found


def test_a_compiled_block_has_its_own_rates_or_those_of_a_block() -> None:
    asked: tuple[RatedKind, Dtype, int, int, int] = ("compiled block", "bfloat16", 4096, 200_000_000, 512)
    plain = replace(HARDWARE, stage_rates=RATES)
    assert plain.stage_rate(*asked) == plain.stage_rate("block", *asked[1:])
    near = rate(110_000_000, 2048, hidden=1024, kind="compiled block", forward=9e12)
    toy = rate(90_000_000, 512, hidden=4096, kind="compiled block", forward=1e6)  # less than half of its parameters
    both = replace(HARDWARE, stage_rates=(*RATES, near, toy))
    assert both.stage_rate(*asked) == near and both.stage_rate("block", *asked[1:]).forward == 3e12
    assert replace(HARDWARE, stage_rates=(*RATES, toy)).stage_rate(*asked).forward == 3e12


@pytest.mark.parametrize(
    ("changes", "tokens", "size"),
    [
        ({}, 128, 510),  # 500 and a little more
        ({}, 256, 1020),
        ({"graph": 4096}, 128, 2048),  # never more than operators save one by one
        ({"graph": 0}, 128, 2048),  # not measured
        ({"params": 2 << 20}, 128, 2048),  # of another block
        ({"hidden": 512}, 128, 2048),
    ],
)
def test_a_graph_takes_what_was_measured_of_this_very_block(changes: dict[str, Any], tokens: int, size: int) -> None:
    measured = replace(rate(1 << 20, 128, kind="compiled block"), graph=500)
    found = with_measured_graphs(
        with_graphs(SPEC, size=2048), replace(HARDWARE, stage_rates=(replace(measured, **changes),)), tokens
    )
    graphs = [stage.operators for stage in found.stages if stage.kind == "block" and stage.params == 1 << 20]
    assert [operators[0].bytes for operators in graphs] == [size] * len(graphs) and len(graphs) > 1
    assert len({id(operators) for operators in graphs}) == 1 or size == 2048, "a search relies on it"


def test_a_frozen_stage_and_a_trained_one_are_told_apart() -> None:
    frozen = replace(rate(10_000_000, 512), width=512, threads=2, layers="lora/512", forward_flops=1.0)
    trained = replace(frozen, trained=10_000_000, layers="full/512")
    kept = replace(HARDWARE, stage_rates=merged_rates((frozen,), (trained,)))
    asked = ("block", "bfloat16", 1024, 10_000_000)
    for some, found in ((0, frozen), (10_000_000, trained)):
        assert kept.own_rates(*asked, trained=some, threads=2) == (found,)
    assert kept.own_rates(*asked, trained=7, threads=1) == kept.stage_rates
    for padded, found in ((10_100_000, (trained,)), (9_900_000, (trained,)), (10_300_000, ())):  # as frozen ones lie in files
        assert kept.own_rates(*asked[:3], padded, trained=10_000_000, threads=2) == found


def test_a_recipes_own_stages_replace_all_that_was_known_of_them() -> None:
    """What was timed for the same layers at another length stays, and so does all of other stages."""
    own = replace(rate(10_000_000, 512), width=512, threads=2, layers="mine/512", forward_flops=1.0)
    shorter, longer = replace(own, width=128), replace(own, width=2048, tokens=4096, layers="mine/2048")
    others = replace(own, tokens=256, layers="another/512")
    kept = merged_rates((*RATES, others, longer), (own, shorter))
    assert set(kept) == {own, shorter, longer, *RATES[2:]}
    assert merged_rates(kept, (replace(own, forward=9.0),)) == merged_rates(
        (replace(own, forward=9.0),), tuple(set(kept) - {own})
    )
    assert replace(HARDWARE, stage_rates=kept).own_rates("block", "bfloat16", 1024, 10_000_000, trained=0, threads=2) == tuple(
        each for each in kept if each.params == 10_000_000
    )


def test_without_rates_of_stages_the_matrix_product_stands_for_them() -> None:
    fallback = HARDWARE.stage_rate("block", "bfloat16", 1024, 5, 7)
    assert (fallback.forward, fallback.backward) == (HARDWARE.matmul_flops, HARDWARE.matmul_flops)
    assert fallback.shape[:5] == ("block", "bfloat16", 1024, 5, 0)  # of no micro-batch


def test_ties_are_broken_the_same_way() -> None:
    apart = (rate(10, 64, hidden=512, forward=1.0), rate(10, 64, hidden=2048, forward=2.0))
    for rates in (apart, apart[::-1]):
        assert replace(HARDWARE, stage_rates=rates).stage_rate("block", "bfloat16", 1024, 10, 64).forward == 1.0


def test_a_shape_measured_again_replaces_itself_only() -> None:
    again = rate(10_000_000, 512, forward=9e12)
    merged = merged_rates(RATES, (again,))
    assert len(merged) == len(RATES) and again in merged and RATES[0] not in merged
    assert set(RATES[1:]) < set(merged)
    assert merged == merged_rates(tuple(reversed(RATES)), (again,))


def test_one_update_thread() -> None:
    assert replace(HARDWARE, adamw=((1, 3e9), (2, 5e9))).adamw_bytes == 3e9
    assert replace(HARDWARE, adamw=()).adamw_bytes == 0.0


def test_the_digest_names_rates_and_nothing_else() -> None:
    base = replace(HARDWARE, stage_rates=RATES)
    assert base.digest() == replace(base).digest() and len(base.digest()) == 12
    same = replace(base, ram_available=1, disk_free=2, name="x", measured="described", drives=(Drive(model="d", capacity=1),))
    assert same.digest() == base.digest()
    graph = (replace(RATES[0], graph=1), *RATES[1:])
    changes = ({"store_read": 1.0}, {"adamw": ((1, 1.0),)}, {"stage_rates": RATES[1:]}, {"stage_rates": graph}, {"dram": 0.5})
    for change in changes:
        assert replace(base, **change).digest() != base.digest(), change  # type: ignore[arg-type]


# ---- what a request leaves of a machine ------------------------------------------------------------------------------


ADAMW_RATES = ((1, 12e9), (2, 24e9), (4, 40e9), (8, 55e9), (16, 56e9))
DESKTOP = replace(HARDWARE, cores=16, adamw=ADAMW_RATES)


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


def test_processes_of_a_box_share_it_and_those_on_one_card_its_memory() -> None:
    box = replace(HARDWARE, device="cuda", cores=8, device_memory=1 << 30, device_free=1 << 29, stage_rates=RATES)
    own, half = box.shared(4), box.shared(4, on_card=2)
    assert (own.cores, own.device_memory, own.stage_rates) == (2, box.device_memory, RATES)
    assert (half.cores, half.device_memory, half.device_free) == (2, box.device_memory // 2, box.device_free // 2)
    assert half.matmul_flops == own.matmul_flops / 2 and half.ram_available == own.ram_available == box.ram_available // 4
