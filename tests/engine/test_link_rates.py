"""The link between boxes, measured by the ranks at its ends: scripts/prove_boxes.py does it over links of known rates."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fuyou_cli.engine.link_rates import _passed, measured_network
from fuyou_cli.engine.ranks import Ranks
from fuyou_cli.spec.hardware import ASSUMED_LINK, LATENCY, Network

BOXES = Network(boxes=2, ranks_per_box=2)


def measure(rank: int, store: str, found: Any) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, BOXES.ranks), rank=rank, world_size=BOXES.ranks)
    ranks = Ranks()
    sent = ranks.sent
    alone = measured_network(ranks, replace(BOXES, boxes=1, ranks_per_box=4))
    assert ranks.sent == sent, "one box has no link"
    found.put((measured_network(ranks, BOXES), alone))
    dist.barrier()


def test_all_ranks_measure_the_same_link(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    ranks = [context.Process(target=measure, args=(rank, str(tmp_path / "store"), found), daemon=True) for rank in range(4)]
    for process in ranks:
        process.start()
    networks = [found.get(timeout=120) for _ in ranks]
    for process in ranks:
        process.join()
        assert process.exitcode == 0
    (network, alone), *others = networks
    assert others == [(network, alone)] * 3
    assert alone == replace(BOXES, boxes=1, ranks_per_box=4)
    assert network == replace(BOXES, link=network.link, latency=network.latency, link_name="measured")
    assert 1e6 < network.link < 1e11 and 1e-6 < network.latency < 1


def test_a_rank_that_is_run_late_does_not_find_a_link_without_end() -> None:
    """All parts are there when it looks for the first one."""
    assert _passed(10.0, 10.1, 10.9) == 10.9 - 10.1
    assert _passed(10.0, 10.9, 10.9) == (10.9 - 10.0) / 2


def test_results_do_not_depend_on_what_was_measured() -> None:
    """Micro-batches are chosen by the link that is assumed."""
    slow = replace(BOXES, link=1e5, latency=0.1, link_name="measured")
    assert (slow.assumed.link, slow.assumed.latency) == (ASSUMED_LINK, LATENCY)
    described = replace(slow, link_name="1GbE")
    assert described.assumed == described
