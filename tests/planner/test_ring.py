"""Stages dealt to ranks: who has what, what crosses, and that no owner map makes ranks wait for each other for ever."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuyou_cli.cli.render.ring_screen import stages_in_words
from fuyou_cli.core.errors import UsageError
from fuyou_cli.planner.place import plan
from fuyou_cli.planner.ring import Boundary, Exchange, check_owners, deal, exchanges, groups, work
from fuyou_cli.planner.schedule import Schedule, expand, plan_schedule
from fuyou_cli.spec.model import ModelSpec
from fuyou_cli.spec.plan import Plan

from .models import HARDWARE, SPEC, cut, link_bytes, model, models, request, request_for, with_budget, with_graphs

PIECE = 1 << 18
EIGHT = model(1 << 20, *[1 << 20] * 8, 1 << 11, 4 << 20)


def random_owners(spec: ModelSpec, ranks: int, chance: random.Random) -> tuple[int, ...]:
    """Gives every rank a block, and groups of stages to anybody."""
    listed = groups(spec)
    blocks = [n for n, group in enumerate(listed) if any(spec.stages[stage].kind == "block" for stage in group)]
    first = dict(zip(chance.sample(blocks, ranks), range(ranks), strict=True))
    owners = [0] * len(spec.stages)
    for number, group in enumerate(listed):
        rank = first.get(number, chance.randrange(ranks))
        for stage in group:
            owners[stage] = rank
    return tuple(owners)


def step_of(spec: ModelSpec, chosen: Plan) -> Schedule:
    return expand(
        spec, stages=chosen.stages, lookahead=chosen.lookahead, micro_batches=chosen.numerics.micro_batches,
        commit_every=None, sweeps=chosen.sweeps, norm_first=chosen.norm_first,
    )  # fmt: skip


# ---- a rank's view ----------------------------------------------------------------------------------------------------


def test_views_share_the_model_out() -> None:
    owners = deal(EIGHT, 3)
    views = [EIGHT.of_rank(owners, rank) for rank in range(3)]
    for name in ("parameters", "updated_parameters", "stored_weight_bytes", "stored_state_bytes", "trained_parameters"):
        assert sum(getattr(view, name) for view in views) == getattr(EIGHT, name), name
    for view in views:
        assert len(view.stages) == len(EIGHT.stages)
        for stage, whole in zip(view.stages, EIGHT.stages, strict=True):
            assert stage == whole or (stage.away and not (stage.params or stage.operators or stage.keeps_input))


@given(st.data())
def test_ranks_visit_each_stage_once_between_them(data: st.DataObject) -> None:
    spec = data.draw(models())
    ranks = data.draw(st.integers(1, sum(stage.kind == "block" for stage in spec.stages)))
    owners = deal(spec, ranks)
    asked = with_budget(data.draw(request_for(spec)), 1 << 40)
    whole = plan_schedule(spec, plan(spec, HARDWARE, asked))
    found: Counter[tuple[str, int, int, bool]] = Counter()
    for rank in range(ranks):
        view = spec.of_rank(owners, rank)
        visits = plan_schedule(view, plan(view, HARDWARE, asked)).visits
        found.update((visit.phase, visit.stage, visit.sweep, visit.again) for visit in visits)
    assert found == Counter((visit.phase, visit.stage, visit.sweep, visit.again) for visit in whole.visits)


# ---- dealing -----------------------------------------------------------------------------------------------------------


def test_a_rank_has_no_more_than_a_block_over_its_share() -> None:
    for ranks in (2, 3, 4, 8):
        owners = deal(EIGHT, ranks)
        check_owners(EIGHT, owners, ranks)
        times = [work(stage, cut_head=False) for stage in EIGHT.stages]
        loads = [sum(t for t, owner in zip(times, owners, strict=True) if owner == rank) for rank in range(ranks)]
        share, block = sum(times) / ranks, times[1]
        head_alone = times[-2] + times[-1] + block  # the head cannot be divided, and its rank has a block
        assert max(loads) <= max(share + block, head_alone), (ranks, loads)


def test_blocks_go_round() -> None:
    flat = model(1 << 11, *[1 << 20] * 8, 1 << 11, 1 << 11)
    assert deal(flat, 2) == (0, 0, 1, 0, 1, 0, 1, 0, 1, 1, 1)
    assert deal(flat, 4)[1:9] == (0, 1, 2, 3, 0, 1, 2, 3)


@pytest.mark.parametrize("block", [0.1, 0.3 / 7, 1 / 3, 0.0236171])
def test_blocks_go_round_whatever_is_rounded(block: float) -> None:
    flat = model(1 << 11, *[1 << 20] * 32, 1 << 11, 1 << 11)
    assert deal(flat, 4, [0.0, *[block] * 32, 0.0, 0.0])[1:33] == (0, 1, 2, 3) * 8


def test_a_rank_with_a_long_head_has_fewer_blocks() -> None:
    owners = deal(EIGHT, 2)
    assert owners[-1] == 1
    assert owners[1:9].count(0) == 6 and owners[1:9].count(1) == 2


def test_seconds_count_where_they_are_known() -> None:
    flat = model(1 << 11, *[1 << 20] * 6, 1 << 11, 1 << 11)
    slow_front = [4.0, *[1.0] * 6, 0.0, 0.0]
    assert deal(flat, 2, slow_front)[1:7].count(0) < 3


def test_a_tied_head_has_its_embeddings_owner() -> None:
    tied = model(1 << 20, *[1 << 20] * 4, 1 << 11, 1 << 20, tied=True)
    owners = deal(tied, 2)
    assert owners[0] == owners[1] == owners[-1] == owners[-2] == 0
    with pytest.raises(UsageError, match="one rank must compute"):
        check_owners(tied, (*owners[:-1], 1), 2)


def test_pieces_of_a_head_in_turn() -> None:
    pieces = cut(EIGHT, *[PIECE] * 6)
    owners = deal(pieces, 4, head_in_turn=True)
    check_owners(pieces, owners, 4)
    assert owners[-7:] == (3, 3, 0, 1, 2, 3, 0) and set(deal(pieces, 4)[-7:]) == {3}
    with pytest.raises(UsageError, match="one rank must compute stage 14, stage 15 together"):  # the norm and the first one
        check_owners(pieces, (*owners[:15], 1, *owners[16:]), 4)
    named = [stages_in_words(pieces.of_rank(owners, rank)) for rank in (0, 1, 3)]
    assert named[1:] == ["2 blocks, head piece 3", "2 blocks, norm, head pieces 1 and 5"] and named[0].endswith(
        "pieces 2 and 6"
    )
    assert stages_in_words(pieces.of_rank(deal(pieces, 4), 3)).endswith("norm, head")
    many = cut(EIGHT, *[PIECE] * 9)
    assert stages_in_words(many.of_rank(deal(many, 4, head_in_turn=True), 3)).endswith("head pieces 1, 5 and 9")
    projected = replace(pieces.stages[-1].tensors[0], shape=(PIECE, 512))
    narrow = replace(pieces, stages=(*pieces.stages[:-1], replace(pieces.stages[-1], tensors=(projected,))))
    for whole in (narrow, cut(model(1 << 20, *[1 << 20] * 4, 1 << 11, 1 << 20, tied=True), *[PIECE] * 6)):
        assert deal(whole, 4, head_in_turn=True) == deal(whole, 4)
        with pytest.raises(UsageError, match="one rank must compute"):
            check_owners(whole, (*deal(whole, 4)[:-1], 1), 4)


def test_ranks_without_a_block_are_refused() -> None:
    with pytest.raises(UsageError, match="9 ranks cannot share a model of 8 blocks"):
        deal(EIGHT, 9)
    with pytest.raises(UsageError, match="rank 1 has no block"):
        check_owners(EIGHT, (0,) * len(EIGHT.stages), 2)
    with pytest.raises(UsageError, match=r"train\.compile is not proven"):
        deal(with_graphs(EIGHT, size=1 << 20), 2)


# ---- what crosses ------------------------------------------------------------------------------------------------------


def test_what_one_gives_another_takes() -> None:
    chance = random.Random(3)
    for number in range(60):
        spec = model(1 << 20, *[1 << 20] * (blocks := chance.randint(2, 9)), 1 << 11, 1 << 20, tied=number % 3 == 0)
        spec = cut(spec, *[PIECE] * chance.randint(2, 8)) if number % 4 == 0 else spec
        ranks = chance.randint(2, min(4, blocks))
        owners = random_owners(spec, ranks, chance)
        swept = 2 if number % 2 and not spec.tied_head else None
        chosen = plan(spec, HARDWARE, request(sweeps=swept, cpu_budget=1 << 40, norm_first=None))
        given_by, taken_by = Counter[tuple[int, int, Boundary]](), Counter[tuple[int, int, Boundary]]()
        taken = given_bytes = 0
        for rank in range(ranks):
            view = spec.of_rank(owners, rank)
            schedule = step_of(view, chosen)
            for exchange in exchanges(view, schedule):
                if exchange.gives is not None:
                    given_by[rank, exchange.gives.peer, replace(exchange.gives, peer=0)] += 1
                if exchange.takes is not None:
                    taken_by[exchange.takes.peer, rank, replace(exchange.takes, peer=0)] += 1
            came, left = link_bytes(view, schedule, 256, chosen.sweeps)
            taken, given_bytes = taken + came, given_bytes + left
        cuts = sum(one != other for one, other in pairwise(owners))
        assert given_by == taken_by
        assert sum(given_by.values()) == 2 * cuts * chosen.sweeps
        first = next(stage.index for stage in spec.stages if stage.kind == "head")
        of_head = owners[first:]
        in_pieces, ranks_of_head = sum(one != other for one, other in pairwise(of_head)), len(set(of_head))
        # Up: 12 bytes, and once for each rank the hidden state. Down: a float32 sum with 12 bytes.
        per_token = in_pieces * (12 + 12 + 4 * spec.hidden_size) + (ranks_of_head - 1) * 2 * spec.hidden_size
        assert taken == given_bytes == 256 * (2 * (cuts - in_pieces) * spec.boundary_bytes_per_token + per_token)


# Replays a step of all ranks by rendezvous: a message arrives once it was sent and its receive was posted. A rank posts the
# receives of a visit when it enters the visit before, and holds one boundary that it sends: a micro-batch of the next one takes
# the place of its own. Sums of a head's pieces are received where they are sent from: their receive is posted when the visit
# begins, after what was sent has arrived.

Message = tuple[int, int, Boundary, int, int]  # from, to, what, of which step, micro-batch


class Wire:
    def __init__(self) -> None:
        self.sent: set[Message] = set()
        self.posted: set[Message] = set()
        self.gathered: Counter[int] = Counter()

    def arrived(self, message: Message) -> bool:
        return message in self.sent and message in self.posted


def running(
    rank: int, ranks: int, found: tuple[Exchange, ...], schedule: Schedule, micro_batches: int, wire: Wire
) -> Iterator[None]:
    """Runs two steps of a rank. Yields while it waits."""
    phases = [visit.phase for visit in schedule.visits]
    times: Counter[tuple[str, Boundary]] = Counter()
    leaving: dict[int, Message] = {}
    for step in range(2):
        posted: dict[int, list[Message]] = {}
        for index, exchange in enumerate(found):
            for ahead in (index, index + 1):
                same = ahead < len(found) and schedule.visits[ahead].sweep == schedule.visits[index].sweep
                takes = found[ahead].takes if same else None
                if takes is not None and takes.backward and phases[ahead] == "head":
                    if ahead > index:
                        continue
                    while not all(wire.arrived(message) for message in leaving.values()):
                        yield
                if takes is not None and ahead not in posted:
                    times["takes", takes] += 1
                    key = replace(takes, peer=0)
                    posted[ahead] = [(takes.peer, rank, key, times["takes", takes], n) for n in range(micro_batches)]
                    wire.posted.update(posted[ahead])
            gives = exchange.gives
            if gives is not None:
                times["gives", gives] += 1
            for number in range(micro_batches):
                if exchange.takes is not None:
                    while not wire.arrived(posted[index][number]):
                        yield
                if gives is not None:
                    message = (rank, gives.peer, replace(gives, peer=0), times["gives", gives], number)
                    while number in leaving and not wire.arrived(leaving[number]):
                        yield
                    wire.sent.add(message)
                    leaving[number] = message
                yield
        wire.gathered[step] += 1
        while wire.gathered[step] < ranks:
            yield


def test_two_thousand_owner_maps_end() -> None:
    chance = random.Random(7)
    done = 0
    while done < 2000:
        spec = model(1 << 20, *[1 << 20] * (blocks := chance.randint(2, 12)), 1 << 11, 1 << 20, tied=chance.random() < 0.3)
        spec = cut(spec, *[PIECE] * chance.randint(2, 8)) if chance.random() < 0.5 else spec
        kind = chance.choice(["plain", "swept", "norm first"])
        asked = request(
            cpu_budget=1 << 40, sweeps=2 if kind == "swept" and not spec.tied_head else None,
            **({"norm_first": True, "clip_grad_norm": 1.0} if kind == "norm first" else {}),
        )  # fmt: skip
        chosen = plan(spec, HARDWARE, asked)
        for _ in range(50):
            ranks = chance.randint(2, min(6, blocks))
            owners = random_owners(spec, ranks, chance)
            check_owners(spec, owners, ranks)
            assert ends(spec, chosen, owners, ranks, chance), (spec, owners)
            done += 1


def ends(spec: ModelSpec, chosen: Plan, owners: tuple[int, ...], ranks: int, chance: random.Random) -> bool:
    """Tells whether all ranks come to the end of two steps. They go on in any order, each as far as it can or a little."""
    wire, at_work = Wire(), list[Iterator[None]]()
    for rank in range(ranks):
        view = spec.of_rank(owners, rank)
        schedule = step_of(view, chosen)
        at_work.append(running(rank, ranks, exchanges(view, schedule), schedule, 2, wire))
    waits = 0
    while at_work and waits < 2000:
        before = len(wire.sent), len(wire.posted), sum(wire.gathered.values()), len(at_work)
        for one in chance.sample(at_work, len(at_work)):
            for _ in range(chance.randint(1, 4)):
                if next(one, "over") == "over":
                    at_work.remove(one)
                    break
        waits = waits + 1 if before == (len(wire.sent), len(wire.posted), sum(wire.gathered.values()), len(at_work)) else 0
    return not at_work


def test_a_map_that_cuts_wrongly_would_be_found() -> None:
    """The replay itself: a rank that waits for what nobody sends does not come to its end."""
    wire = Wire()
    takes = Exchange(takes=Boundary(0, False, 1))
    schedule = step_of(SPEC, plan(SPEC, HARDWARE, request()))
    one = running(0, 1, (takes,), replace(schedule, visits=schedule.visits[:1]), 1, wire)
    assert all(next(one, "over") != "over" for _ in range(100))
