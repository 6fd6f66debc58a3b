"""Steps by several ranks of torch.distributed, bit for bit those of one process. Every family in both dtypes, on two ranks and
on three: scripts/prove_ranks.py.

Costs about a minute of two cores."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawn import every, quick_and_slow

from .families import FAMILIES
from .ring import Case, Workers, compare, compare_replicas, in_dtype, run

BFLOAT16: dict[str, Any] = {"dtype": "bfloat16"}
CASES: dict[str, Case] = {
    "no clipping": Case(family="llama", shape=BFLOAT16, way={"clip": None}),
    "as planned": Case(family="llama", way={"home": None}),
    "sweeps": Case(family="llama", shape=BFLOAT16, way={"sweeps": 2}),
    "norm first": Case(family="llama", shape=BFLOAT16, way={"norm_first": True, "lookahead": 2}),
    "dropout, tied, learned positions": Case(family="gpt2, dropout"),
    "a tied head": Case(family="tied llama", shape=BFLOAT16),
    "a cut head": Case(family="llama", shape={"vocabulary": 40, "chunk": 5}),
    "pieces in turn": Case(
        family="llama", shape={"vocabulary": 40, "chunk": 5}, owners="in turn", evaluates=True, widths=(16, 8, 16, 4)
    ),
    "pieces drawn, norm first": Case(
        family="llama", shape={**BFLOAT16, "vocabulary": 20}, owners=5, way={"norm_first": True, "lookahead": 2}
    ),
    "pieces in turn, sweeps": Case(
        family="gptj", shape={**BFLOAT16, "vocabulary": 24}, owners="in turn", way={"sweeps": 2, "clip": None}
    ),
    "pieces in turn, frozen": Case(family="llama", shape={**BFLOAT16, "vocabulary": 40}, owners="in turn", adapter=True),
    "pieces in turn, the emulated device": Case(
        family="llama", shape={**BFLOAT16, "vocabulary": 40}, owners="in turn", way={"device": "emulated"}, evaluates=True
    ),
    "pieces in turn, unlike widths, the emulated device": Case(
        family="llama", shape={"vocabulary": 40}, owners="in turn", way={"device": "emulated"}, widths=(16, 8, 16, 4)
    ),
    "a tied and cut head": Case(family="tied llama", shape={"vocabulary": 40}, way={"norm_first": True}, evaluates=True),
    "projections": Case(family="opt, projected"),
    "frozen below": Case(family="llama", freeze=("model.embed_tokens", "model.layers.[0-1]")),
    "LoRA": Case(family="llama", shape=BFLOAT16, adapter=True),
    "LoRA over nf4": Case(family="llama", shape={**BFLOAT16, "quantised": "nf4"}, adapter=True),
    "int8 states": Case(family="qwen3", shape={"states": "int8"}),
    "outputs kept": Case(family="llama", way={"kept": "all"}),
    "a mixture": Case(family="qwen3_moe", shape={"router_aux_loss": 0.05}, evaluates=True),
    "another mixture": Case(family="gpt_oss", shape={**BFLOAT16, "router_aux_loss": 0.05}),
    "ranges of experts": Case(family="qwen3_moe", shape={"experts": 2}, owners=3, evaluates=True),
    "documents apart": Case(family="llama", documents=((9, 7), (16,), (4, 12), (16,)) * 2),
    "unlike widths": Case(family="gpt2", widths=(16, 8, 16, 4)),
    "the emulated device": Case(family="llama", shape=BFLOAT16, way={"device": "emulated"}, evaluates=True),
    "the emulated device, all in RAM": Case(family="llama", way={"device": "emulated", "home": "cpu", "clip": None}),
    "the emulated device, unlike widths": Case(family="gpt2", widths=(16, 8, 4, 16), way={"device": "emulated"}),
    "the emulated device, ranges of experts": Case(family="qwen3_moe", shape={"experts": 2}, way={"device": "emulated"}),
    "evaluations": Case(family="gemma2", evaluates=True),
    "a multiplier behind the embedding": Case(family="granite"),
}
RARER = {  # one by one what others have together, or what one process is compared with itself for
    "all in RAM", "as planned", "a tied head", "a cut head", "projections", "LoRA", "outputs kept", "another mixture",
    "pieces in turn, frozen", "pieces in turn, unlike widths, the emulated device",
    "the emulated device, all in RAM", "the emulated device, unlike widths",
    "evaluations", "a multiplier behind the embedding",
}  # fmt: skip


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    found = Workers(4)  # replicas divide the lanes
    yield found
    found.stop()


@pytest.mark.parametrize("family", every(3, FAMILIES))
def test_families_on_two_ranks(family: str, workers: Workers) -> None:
    compare(in_dtype(Case(family=family), "bfloat16"), workers, 2)


@pytest.mark.parametrize("family", every(6, FAMILIES))
def test_families_on_three_ranks(family: str, workers: Workers) -> None:
    compare(Case(family=family, owners=len(family)), workers, 3)


@pytest.mark.parametrize("name", quick_and_slow(CASES, lambda number: [*CASES][number] not in RARER))
def test_on_two_ranks(name: str, workers: Workers) -> None:
    """A device copies to and from other ranks in memory that it has pinned."""
    _, among = compare(CASES[name], workers, 2)
    assert CASES[name].way.get("device") is None or [seen.beside_arena for seen in among] == [0, 0]


def test_messages_of_one_tag_keep_their_order() -> None:
    """`Link` gives all micro-batches of a boundary one tag. Receives that come first, and sends that do."""
    store, groups = dist.HashStore(), dict[int, Any]()

    def join(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))

    joining = [Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join()
    sent = [torch.tensor([number]) for number in range(6000)]
    received = [torch.zeros(1, dtype=torch.int64) for _ in sent]
    receives = [groups[1].recv([target], 0, 7) for target in received[:3000]]
    sends = [groups[0].send([source], 1, 7) for source in sent]
    receives += [groups[1].recv([target], 0, 7) for target in received[3000:]]
    for work in (*sends, *receives):
        work.wait()
    assert torch.cat(received).tolist() == list(range(6000))


def test_bytes_of_the_stores_are_those_of_one(workers: Workers) -> None:
    """Each rank's are as it planned, to the byte. Their sum is one process's where as many blocks stay in slots at a turn."""
    case = Case(family="llama", blocks=5, steps=4)
    (alone, among), (_, before) = compare(case, workers, 2), compare(replace(case, steps=3), workers, 2)
    for seen, less in zip(among, before, strict=True):
        assert tuple(a - b for a, b in zip(seen.moved, less.moved, strict=True)) == seen.predicted
    assert tuple(map(sum, zip(*(seen.moved for seen in among), strict=True))) == alone.moved


def test_a_rank_with_fewer_visits_than_it_looks_ahead(workers: Workers) -> None:
    compare(CASES["frozen below"], workers, 3)


def test_waits_have_names(workers: Workers) -> None:
    _, (first, second) = compare(Case(family="llama", way={"home": "cpu"}), workers, 2)
    assert "boundary of rank 1" in first.stalls and "boundary of rank 0" in second.stalls


@pytest.mark.parametrize("skips", [False, True])
def test_all_ranks_refuse_what_one_does(skips: bool, workers: Workers) -> None:
    """A weight that is NaN is in everybody's numbers at once; with clipping nothing was updated by then."""
    alone, _ = compare(Case(family="llama", breaks=True, skips=skips), workers, 2)
    assert alone.error.startswith("NumericsError: step 1: the loss") or (skips and alone.numbers[0][2])


def test_unlike_plans_are_refused(workers: Workers) -> None:
    workers.start(Case(family="llama", unlike={"norm_first": True}), 2)
    for seen in workers.seen(2):
        assert seen.error == "UsageError: the ranks planned unlike steps: norm_first is False on rank 0 and True on rank 1"


LARGE: dict[str, Any] = {"batch": 24, "micro": 1, "tokens": 64}  # a boundary of the whole batch is much more than a stage's own


def test_a_step_stays_within_what_is_charged(workers: Workers) -> None:
    """A rank holds what it receives for the next visit beside the two boundaries of its visit, of which one leaves."""
    alone, among = compare(Case(family="llama", shape=LARGE, way={"home": "cpu"}, measures=True), workers, 2)
    for seen in among:
        (peak, charged), boundary = seen.alive, 24 * 64 * 32 * 4
        assert alone.alive[0] < peak <= alone.alive[0] + boundary
        assert peak <= charged == alone.alive[1] + boundary


def test_ranks_that_share_a_head_stay_within_what_is_charged(workers: Workers) -> None:
    case = Case(family="llama", shape={**LARGE, "vocabulary": 40}, owners="in turn", way={"home": "cpu"}, measures=True)
    _, among = compare(case, workers, 2)
    assert all(peak <= charged for peak, charged in (seen.alive for seen in among)), [seen.alive for seen in among]


IN_LANES: dict[str, Any] = {"lanes": 4}
REPLICAS: dict[str, Case] = {
    "clipped, with dropout": Case(family="llama", shape=IN_LANES, adapter={"lora_dropout": 0.2}),
    "no clipping": Case(
        family="qwen3", shape=BFLOAT16 | IN_LANES, adapter={"use_dora": True}, way={"clip": None, "home": None}
    ),
    "a tied head": Case(family="tied llama", shape=BFLOAT16 | IN_LANES, adapter=True, way={"home": "cpu"}),
    "learned positions": Case(family="gpt2", shape=IN_LANES, adapter=True),
    "a cut head, a mixture": Case(
        family="qwen3_moe", shape={"vocabulary": 40, "chunk": 5, **IN_LANES},
        adapter={"target_modules": ["q_proj", "v_proj"]},
    ),
    "ranges of experts": Case(family="qwen3_moe", shape={"experts": 2, **BFLOAT16, **IN_LANES}, adapter={"experts": True}),
    "rows of other widths": Case(family="mistral", shape=IN_LANES, adapter=True, widths=(16, 12, 9, 5)),
    "documents": Case(family="llama", shape=IN_LANES, adapter=True, documents=((9, 7), (16,), (4, 12), (16,)) * 2),
    "not finite": Case(family="llama", shape=IN_LANES, adapter=True, breaks=True),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLICAS)
def test_replicas(name: str, workers: Workers) -> None:
    """Processes that each compute the whole model, for some lanes of a step."""
    alone, among = compare_replicas(REPLICAS[name], workers, 2)
    trained = sum(stage.trained for stage in REPLICAS[name].subject().spec.stages)
    item, steps = 4, REPLICAS[name].steps
    assert alone.error or all(seen.summed <= item * trained * steps for seen in among)
    compare_replicas(REPLICAS[name], workers, 4, alone)


def test_lanes_are_numerics(workers: Workers) -> None:
    """Their number changes bits, where they are computed does not: here a ring computes them."""
    case = REPLICAS["clipped, with dropout"]
    alone, _ = compare(case, workers, 2)
    assert alone.states != run(replace(case, shape={})).states


def test_a_replica_that_ends_is_named(workers: Workers) -> None:
    """One of the last tests here, because it takes a worker."""
    workers.start(replace(REPLICAS["clipped, with dropout"], leaves=3), 4, replicates=True)
    for seen in workers.seen(3):
        assert seen.error.startswith(f"PeerLost: rank 3 on {socket.gethostname()} was lost (")


@pytest.mark.gpu
@pytest.mark.parametrize("adapter", [False, True])
def test_two_ranks_on_one_card(adapter: bool, workers: Workers) -> None:
    """One process's batch passes through the host too: otherwise rotary tables are computed elsewhere."""
    case = Case(family="llama", shape=BFLOAT16, way={"device": "cuda", "batch_on_device": False}, adapter=adapter)
    _, among = compare(case, workers, 2)
    assert [seen.beside_arena for seen in among] == [0, 0]


def test_a_rank_that_ends_is_named(workers: Workers) -> None:
    """The last test here, because it takes a worker."""
    workers.start(Case(family="llama", leaves=2), 3)
    for seen in workers.seen(2):
        assert seen.error.startswith(f"PeerLost: rank 2 on {socket.gethostname()} was lost (")
