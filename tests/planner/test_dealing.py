"""Stages dealt by what they take on a rank's machine: compute, updates, drives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuyou_cli.core.units import GiB
from fuyou_cli.machine.described import described
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.ring import check_owners, deal, fastest_deal, slowest, stage_times, work
from fuyou_cli.spec.hardware import STORE_RATES, Network

from .models import HARDWARE, NUMERICS, request
from .test_plans import transformer

MACHINE = described("rtx4090,gen4,64GiB")
ROWS = replace(NUMERICS, batch_size=8, micro_batch_size=1, max_seq_len=4096, accumulate_dtype="bfloat16")
PLAIN = transformer(4096, 32, ROWS)
HEAD = replace(PLAIN.stages[-1], forward_flops=2.0 * PLAIN.stages[-1].params * ROWS.micro_batch_tokens)
LLAMA = replace(PLAIN, stages=(*PLAIN.stages[:-1], HEAD))
ASKED = PlanRequest(
    numerics=ROWS, model_name="8B", device="cuda", clip_grad_norm=1.0, cpu_budget=int(0.9 * MACHINE.ram_available),
    gpu_budget=int(0.95 * MACHINE.device_memory), scratch_size=64 << 20, update_threads=4, sustained=True,
)  # fmt: skip


def blocks_of(owners: tuple[int, ...]) -> list[int]:
    blocks = [owners[stage.index] for stage in LLAMA.stages if stage.kind == "block"]
    return [blocks.count(rank) for rank in range(max(owners) + 1)]


@pytest.mark.parametrize(("ranks", "most"), [(2, 1.03), (3, 1.05), (4, 1.05), (8, 1.15)])
def test_no_rank_takes_much_longer_than_its_share(ranks: int, most: float) -> None:
    """Where drives bind, which a deal by FLOPs does not count. `most`: times its share; blocks of eight ranks are few."""
    small = replace(ASKED, cpu_budget=4 * GiB, gpu_budget=0)
    times, owners = stage_times(LLAMA, MACHINE, small), fastest_deal(LLAMA, MACHINE, small, Network(boxes=ranks))
    check_owners(LLAMA, owners, ranks)
    all_memory = replace(small, cpu_budget=ranks * small.cpu_budget)
    share = slowest((0,) * len(times), times, MACHINE, all_memory) / ranks
    assert slowest(owners, times, MACHINE, small) <= most * share < slowest(deal(LLAMA, ranks), times, MACHINE, small)


def test_where_compute_binds_the_heads_rank_has_as_many_blocks() -> None:
    """All others wait for the head, however few blocks its rank has."""
    fast = replace(MACHINE, adamw=((1, 1e15),), store_read=1e15, store_write=1e15, sustained_write=0.0)
    assert blocks_of(fastest_deal(LLAMA, fast, ASKED, Network(boxes=2))) == [16, 16]
    assert blocks_of(fastest_deal(LLAMA, fast, ASKED, Network(boxes=4))) == [8, 8, 8, 8]


def test_where_updates_bind_the_embedding_counts_for_its_parameters() -> None:
    slow, table = replace(MACHINE, adamw=((1, 1e8),)), replace(LLAMA.stages[0], banks=2 * LLAMA.stages[0].banks)
    wide = replace(LLAMA, stages=(table, *LLAMA.stages[1:]))  # more than the head has on the other rank
    by_compute, by_updates = (blocks_of(fastest_deal(wide, machine, ASKED, Network(boxes=2))) for machine in (MACHINE, slow))
    assert by_compute == [16, 16]
    assert by_updates[1] - by_updates[0] == pytest.approx(HEAD.params / LLAMA.stages[1].params, abs=1)


def test_what_rests_in_memory_does_not_cross() -> None:
    """Without drives as without RAM: a rank that has room for all of its states waits for no drive."""
    owners, large = deal(LLAMA, 2), replace(ASKED, cpu_budget=1024 * GiB)
    times = stage_times(LLAMA, MACHINE, ASKED)
    crawling = replace(MACHINE, **dict.fromkeys(STORE_RATES, 1e6))
    assert slowest(owners, times, crawling, large) == slowest(owners, times, MACHINE, large)
    small = replace(ASKED, cpu_budget=4 * GiB)
    assert slowest(owners, times, crawling, small) > 2 * slowest(owners, times, MACHINE, small)


def test_without_rates_flops_decide() -> None:
    unknown = replace(HARDWARE, matmul_flops=0.0, stage_rates=(), adamw=())
    flops = [work(stage, cut_head=False) * (stage.kind == "block") for stage in LLAMA.stages]
    assert fastest_deal(LLAMA, unknown, request(), Network(boxes=2)) == deal(LLAMA, 2, flops)


@pytest.mark.parametrize(
    "boxes, described",
    [("aa", (1, 2)), ("ab", (2, 1)), ("aabb", (2, 2)), ("aab", (3, 1)), ("abb", (3, 1)), ("abab", (4, 1)), ("aabbbb", (6, 1))],
)
def test_every_rank_has_a_place_on_the_network_whatever_boxes_have(boxes: str, described: tuple[int, int]) -> None:
    network = Network.between([[name] for name in boxes])
    assert (network.boxes, network.ranks_per_box) == described and network.ranks == len(boxes)
