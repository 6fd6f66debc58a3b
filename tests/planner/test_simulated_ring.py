"""A step of several ranks, simulated: what it takes where compute, the link or its latency binds, and what crosses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fuyou_cli.planner.place import plan
from fuyou_cli.planner.plan_request import PlanRequest
from fuyou_cli.planner.ring import RankPlan, RingTimeline, chain_seconds, deal, fastest_deal, of_other_ranks, simulate_ring
from fuyou_cli.planner.schedule import plan_schedule
from fuyou_cli.planner.simulate import simulate
from fuyou_cli.spec.hardware import Network
from fuyou_cli.spec.model import ModelSpec

from .models import HARDWARE, NUMERICS, cut, link_bytes, request, stage

ENDLESS = 1e15  # bytes per second
BLOCKS = 8
ROWS = replace(NUMERICS, batch_size=8, micro_batch_size=1)
MACHINE = replace(HARDWARE, matmul_flops=1e9, adamw=((1, ENDLESS),), store_read=ENDLESS, store_write=ENDLESS,
                  store_read_mixed=0.0, store_write_mixed=0.0, host_copy=ENDLESS, host_fresh=ENDLESS)  # fmt: skip
LARGE = 1 << 40


def blocks_alone(count: int = BLOCKS) -> ModelSpec:
    """A model whose blocks alone compute: each 1 FLOP per parameter of 2^20, so a forward takes 2 ms a micro-batch."""
    sizes = [1 << 11, *[1 << 20] * count, 1 << 11, 1 << 11]
    kinds = ["embedding", *["block"] * count, "norm", "head"]
    stages = [stage(index, kind, size) for index, (kind, size) in enumerate(zip(kinds, sizes, strict=True))]  # type: ignore[arg-type]
    alone = [one if one.kind == "block" else replace(one, forward_flops=0.0) for one in stages]
    return ModelSpec(
        architecture="Test", compute_dtype="bfloat16", hidden_size=1024, vocab_size=32000, tied_head=False,
        boundary_bytes_per_token=2048, choreography_bytes_per_token=2048, stages=tuple(alone),
    )  # fmt: skip


MODEL = blocks_alone()


def asked(rows: int = 8, **changes: Any) -> PlanRequest:
    homes = dict.fromkeys(("weights", "states", "gradients", "boundaries"), "cpu")
    return replace(request(), cpu_budget=LARGE, kept="none", numerics=replace(ROWS, batch_size=rows), **(homes | changes))


def step_of(
    owners: tuple[int, ...], network: Network, wanted: PlanRequest | None = None, spec: ModelSpec = MODEL
) -> RingTimeline:
    wanted = wanted or asked()
    views = [spec.of_rank(owners, rank) for rank in range(max(owners) + 1)]
    return simulate_ring([RankPlan(model=view, hardware=MACHINE, plan=plan(view, MACHINE, wanted)) for view in views], network)


def alone(wanted: PlanRequest | None = None) -> float:
    chosen = plan(MODEL, MACHINE, wanted or asked())
    return simulate(MODEL, MACHINE, chosen, plan_schedule(MODEL, chosen)).step_seconds


FAST = Network(boxes=2, link=ENDLESS, latency=0.0)


def test_ranks_share_the_compute() -> None:
    """The rank that has the last block waits for its first micro-batch, and the other one at the turn."""
    one, two = alone(), step_of(deal(MODEL, 2), FAST)
    assert one / 2 < two.step_seconds < 1.1 * one / 2
    assert all(of_other_ranks(cause) for timeline in two.ranks for cause in timeline.stalls)


def test_one_micro_batch_keeps_one_rank_at_work() -> None:
    one, two = alone(asked(1)), step_of(deal(MODEL, 2), FAST, asked(1))
    assert two.step_seconds == pytest.approx(one, abs=0.002)  # they meet


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_slow_link_binds(share: float) -> None:
    """Of a boundary each micro-batch crosses while others compute. `share`: of the rate with which the link is as busy as
    ranks in forward."""
    forward = 8 * 2 * (1 << 20) / MACHINE.matmul_flops  # of a block, all micro-batches
    crossing = 8 * 64 * 2048  # bytes of its output
    network = replace(FAST, link=share * crossing / forward)
    found = step_of(deal(MODEL, 2), network)
    sends = BLOCKS / 2  # of each rank in each direction
    assert found.link_seconds == pytest.approx(2 * sends * crossing / network.link, rel=0.15)
    assert found.step_seconds > step_of(deal(MODEL, 2), FAST).step_seconds + sends * (forward / share - forward)


def test_latency_counts_for_each_micro_batch() -> None:
    late = step_of(deal(MODEL, 2), replace(FAST, latency=0.1)).step_seconds
    assert late > 2 * (BLOCKS - 1) * 0.1, "each block's first micro-batch comes from the other rank"


def test_what_is_sent_is_what_crosses() -> None:
    owners = deal(MODEL, 3)
    found, wanted = step_of(owners, replace(FAST, boxes=3)), asked()
    for rank in range(3):
        view = MODEL.of_rank(owners, rank)
        assert found.sent[rank] == link_bytes(view, plan_schedule(view, plan(view, MACHINE, wanted)), 8 * 64)[1]


@pytest.mark.parametrize("changes", [{"sweeps": 2}, {"norm_first": True, "clip_grad_norm": 1.0}])
def test_other_orders_of_a_step(changes: dict[str, Any]) -> None:
    found = step_of(deal(MODEL, 2), FAST, asked(**changes))
    assert found.step_seconds < 0.75 * alone(asked(**changes))


def test_ranks_of_one_box_do_not_use_its_link() -> None:
    crawling = Network(boxes=1, ranks_per_box=2, link=1.0)
    assert step_of(deal(MODEL, 2), crawling).link_seconds == 0.0


def test_blocks_in_a_row_for_a_link_that_crawls() -> None:
    crawling = replace(FAST, link=1e5)
    owners = fastest_deal(MODEL, MACHINE, asked(), crawling)
    in_rows = step_of(owners, crawling).step_seconds
    assert [owners[1 : BLOCKS + 1].count(rank) for rank in range(2)] == [4, 4]
    assert in_rows < step_of(deal(MODEL, 2), crawling).step_seconds / 2
    assert fastest_deal(MODEL, MACHINE, asked(), FAST) == deal(MODEL, 2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_head_is_waited_for_whatever_its_rank_has_beside(ranks: int) -> None:
    """Fewer blocks for its rank would be more for others, which all rest while it computes."""
    head = replace(MODEL.stages[-1], forward_flops=3 * MODEL.stages[1].forward_flops)
    spec, network = replace(MODEL, stages=(*MODEL.stages[:-1], head)), replace(FAST, boxes=ranks)
    found = step_of(fastest_deal(spec, MACHINE, asked(), network), network, spec=spec).step_seconds
    assert found < 0.97 * step_of(deal(spec, ranks), network, spec=spec).step_seconds


PIECES = cut(MODEL, *[1 << 20] * 8)  # of a head, each as long as a block or longer


@pytest.mark.parametrize(("link", "in_turn"), [(ENDLESS, True), (1e9, True), (2e6, False)])
def test_pieces_of_a_head_go_round_where_the_link_is_fast(link: float, in_turn: bool) -> None:
    network = replace(FAST, boxes=4, link=link)
    owners, whole = fastest_deal(PIECES, MACHINE, asked(), network), deal(PIECES, 4)
    assert (len(set(owners[-8:])) == 4) == in_turn
    found = step_of(owners, network, spec=PIECES)
    with_head = step_of(whole, network, spec=PIECES)
    assert found.step_seconds < 0.75 * with_head.step_seconds if in_turn else found.step_seconds <= with_head.step_seconds
    for rank in range(4):
        view = PIECES.of_rank(owners, rank)
        assert found.sent[rank] == link_bytes(view, plan_schedule(view, plan(view, MACHINE, asked())), 8 * 64)[1]


@pytest.mark.parametrize("link", [1e6, 1e7, 1e9, ENDLESS])
def test_the_estimate_of_a_deal_is_near_its_step(link: float) -> None:
    network = replace(FAST, link=link)
    found = step_of(fastest_deal(MODEL, MACHINE, asked(), network), network)
    assert chain_seconds(MODEL, MACHINE, asked(), network) == pytest.approx(found.step_seconds, rel=0.25)
