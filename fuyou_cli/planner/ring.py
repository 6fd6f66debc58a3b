"""Deals a model's stages to ranks, and tells what crosses between them.

Ranks form a ring: each computes all micro-batches of its own stages, and sends each output to the rank that computes the next
stage. In backward the gradient of an output goes the other way. Weights, gradients of weights and states never cross. A rank
plans and runs its own view of the model (`ModelSpec.of_rank`), so nothing else here knows of owners.

Embeddings and the first block belong together: the model's own forward adds tables up, scales and masks between them. So do the
norm and the head, and with a tied head all of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ..core.errors import UsageError
from ..spec.model import ModelSpec, StageSpec
from .schedule import Schedule, Visit

OTHER_RANKS = "other ranks"  # name of the stall where all meet
AMONG_REPLICAS = "gradients of other ranks"  # and where replicas add up what they train


def of_other_ranks(cause: str) -> bool:
    """Tells whether a stall is a wait for other ranks or for the link to them."""
    return cause in (OTHER_RANKS, AMONG_REPLICAS) or cause.startswith("boundary ")


def check_ranks(model: ModelSpec, ranks: int) -> None:
    """Raises UsageError if so many ranks cannot share the model."""
    blocks = sum(stage.kind == "block" and stage.expert_range is None for stage in model.stages)
    if ranks > blocks:
        what = f"{ranks} ranks cannot share a model of {blocks} blocks: each computes at least one"
        raise UsageError(what, hint=f"start {blocks} ranks or fewer")
    if ranks > 1 and model.compiled:
        raise UsageError("train.compile is not proven over several ranks", hint="set train.compile: false, or start one rank")


def calls(model: ModelSpec) -> list[list[int]]:
    """Lists the stages by what the model's own forward calls: a block with the ranges of its experts, a table with the pieces
    of its vocabulary; at the end the head, with its pieces."""
    by_call: list[list[int]] = []
    for stage in model.stages:
        first, _ = stage.vocabulary or (0, 0)
        goes_on = stage.expert_range is not None or (first > 0 and model.stages[by_call[-1][0]].kind == stage.kind)
        if goes_on:
            by_call[-1].append(stage.index)
        else:
            by_call.append([stage.index])
    return by_call


def groups(model: ModelSpec) -> list[list[int]]:
    """Lists the stages that one rank must have together: those up to the first block, each block, and those behind the last
    block, which are the first ones' with a tied head."""
    listed = calls(model)
    blocks = [number for number, call in enumerate(listed) if model.stages[call[0]].kind == "block"]
    first, *others = blocks
    front = [stage for call in listed[: first + 1] for stage in call]
    back = [stage for call in listed[blocks[-1] + 1 :] for stage in call]
    between = [
        [stage for call in listed[begin + 1 : end + 1] for stage in call] for begin, end in zip(blocks, others, strict=False)
    ]
    return [front + back, *between] if model.tied_head else [front, *between, back]


def work(stage: StageSpec, *, cut_head: bool) -> float:
    """Returns the FLOPs that a stage computes in a step, for one micro-batch."""
    forward = 0.0 if stage.kind == "embedding" else stage.forward_flops
    if stage.kind == "head":
        return (4.0 if cut_head else 3.0) * forward - stage.frozen_flops
    return forward + (3.0 * forward - stage.frozen_flops - stage.unneeded_flops) * stage.goes_back


def deal(model: ModelSpec, ranks: int, seconds: Sequence[float] | None = None, *, at_a_turn: int = 1) -> tuple[int, ...]:
    """Returns the rank of each stage: as much time for each rank, and in turn, so that a rank computes one stage's
    micro-batches while another computes those before. `seconds`: what each stage takes in a step; None: its FLOPs tell.
    `at_a_turn`: how many blocks a rank has in a row. With more of them less crosses, and ranks wait longer for their first.

    The first rank has the embeddings, the last one the head, unless it is tied. Blocks go to the rank that lacks most of its
    share so far."""
    check_ranks(model, ranks)
    times = [work(stage, cut_head=model.head_is_cut) for stage in model.stages] if seconds is None else seconds
    front, *others = groups(model)
    back = [] if model.tied_head else others.pop()
    blocks = [[stage for stage in front if model.stages[stage].kind == "block"], *others]
    load = [0.0] * ranks
    load[0] += sum(times[stage] for stage in front if stage not in blocks[0])
    load[-1] += sum(times[stage] for stage in back)
    weights = [sum(times[stage] for stage in block) for block in blocks]
    shares = _shares(load, sum(weights))
    dealt = _in_turn(weights, shares)
    for rank in set(range(ranks)) - set(dealt):  # each rank has a block
        most = max(range(ranks), key=lambda other: dealt[1:].count(other))
        dealt[max(number for number, other in enumerate(dealt) if other == most)] = rank
    if at_a_turn > 1:
        dealt = _in_rows([dealt.count(rank) for rank in range(ranks)], at_a_turn)
    owners = [0] * len(model.stages)
    for stages, rank in ((front, 0), (back, ranks - 1), *zip(others, dealt[1:], strict=True)):
        for stage in stages:
            owners[stage] = rank
    return tuple(owners)


def _shares(load: Sequence[float], blocks: float) -> list[float]:
    """Returns the share of the blocks' time that each rank takes, so that all have as much. A rank that has too much takes
    none."""
    taking = list(range(len(load)))
    while True:
        level = (blocks + sum(load[rank] for rank in taking)) / len(taking)
        over = [rank for rank in taking if load[rank] > level]
        if not over:
            break
        taking = [rank for rank in taking if rank not in over]
    return [(level - load[rank]) / blocks if rank in taking and blocks else 0.0 for rank in range(len(load))]


def _in_turn(weights: Sequence[float], shares: Sequence[float]) -> list[int]:
    """Deals blocks to ranks. The first rank has the first block. Of ranks that lack as much, but for rounding, the first comes
    next: so blocks alike go round in one order, and none waits for another's turn."""
    lacks, dealt, unit = [0.0] * len(shares), list[int](), max(weights, default=0.0) or 1.0
    for weight in weights:
        lacks = [lack + share * weight for lack, share in zip(lacks, shares, strict=True)]
        rank = max(range(len(lacks)), key=lambda rank: round(lacks[rank] / unit, 6)) if dealt else 0
        lacks[rank] -= weight
        dealt.append(rank)
    return dealt


def _in_rows(counts: Sequence[int], at_a_turn: int) -> list[int]:
    """Deals so many blocks to each rank in as many turns as it takes if a rank has about `at_a_turn` in each."""
    turns = max(1, round(sum(counts) / (len(counts) * at_a_turn)))
    ends = [[-(-turn * count // turns) for turn in range(turns + 1)] for count in counts]
    return [rank for turn in range(turns) for rank, end in enumerate(ends) for _ in range(end[turn + 1] - end[turn])]


def check_owners(model: ModelSpec, owners: Sequence[int], ranks: int) -> None:
    """Raises UsageError unless every stage has an owner, every rank a block, and what belongs together one owner."""
    check_ranks(model, ranks)
    if len(owners) != len(model.stages) or not all(0 <= owner < ranks for owner in owners):
        raise UsageError(f"{len(model.stages)} stages need an owner each, below {ranks}, not {list(owners)}")
    for together in groups(model):
        if len({owners[stage] for stage in together}) > 1:
            names = ", ".join(model.stages[stage].name for stage in together)
            raise UsageError(f"one rank must compute {names} together, not {sorted({owners[stage] for stage in together})}")
    blocks = {owners[stage.index] for stage in model.stages if stage.kind == "block"}
    if missing := sorted(set(range(ranks)) - blocks):
        raise UsageError(f"rank {missing[0]} has no block to compute")


# ---- what crosses ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Boundary:
    """Names what crosses between two ranks for a visit: the output of stage `stage`, or its gradient (`backward`). `peer`: the
    other rank."""

    stage: int
    backward: bool
    peer: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Says what a visit takes from another rank before it computes a micro-batch, and gives to one after it."""

    takes: Boundary | None = None
    gives: Boundary | None = None


NOTHING = Exchange()


def exchanges(model: ModelSpec, schedule: Schedule) -> tuple[Exchange, ...]:
    """Returns what each visit of a rank's schedule takes and gives, in order."""
    if not model.owners:
        return (NOTHING,) * len(schedule.visits)
    of, listed = dict[int, int](), calls(model)
    for number, call in enumerate(listed):
        of |= dict.fromkeys(call, number)

    def turn(visit: Visit) -> tuple[int, bool, int, bool]:
        return visit.sweep, visit.phase == "backward", of[visit.stage], visit.again

    found: list[Exchange] = []
    for (_, backward, number, again), of_call in groupby(schedule.visits, turn):
        visits = list(of_call)
        if backward:
            takes, gives = _backward(model, listed, number)
        else:
            takes, gives = _forward(model, listed, number, turns=visits[-1].phase == "head", again=again)
        for place, _ in enumerate(visits):
            found.append(Exchange(takes if place == 0 else None, gives if place == len(visits) - 1 else None))
    return tuple(found)


def _forward(
    model: ModelSpec, listed: list[list[int]], number: int, *, turns: bool, again: bool
) -> tuple[Boundary | None, Boundary | None]:
    """Returns what the forward visits of a call take and give. `turns`: the head's, which end with its backward; `again`: once
    more for the same hidden state, which is here."""
    before, after = number - 1, number + 1
    takes = None if again or number == 0 else _other(model, listed[before][0], backward=False)
    if turns:
        passes_on = number > 0 and model.stages[listed[before][-1]].goes_back
        return takes, _other(model, listed[before][0], backward=True) if passes_on else None
    if after == len(listed) or (owner := model.owners[listed[after][0]]) == model.rank:
        return takes, None
    return takes, Boundary(listed[number][0], False, owner)


def _backward(model: ModelSpec, listed: list[list[int]], number: int) -> tuple[Boundary | None, Boundary | None]:
    """Returns what the backward visits of a call take and give."""
    owner = model.owners[listed[number + 1][0]]
    takes = None if owner == model.rank else Boundary(listed[number][0], True, owner)
    passes_on = number > 0 and model.stages[listed[number][0]].passes_on
    return takes, _other(model, listed[number - 1][0], backward=True) if passes_on else None


def _other(model: ModelSpec, stage: int, *, backward: bool) -> Boundary | None:
    """Returns what crosses from or to the owner of a stage; None where that is this rank."""
    owner = model.owners[stage]
    return None if owner == model.rank else Boundary(stage, backward, owner)


def link_bytes(model: ModelSpec, schedule: Schedule, tokens: int, sweeps: int = 1) -> tuple[int, int]:
    """Returns the bytes of boundaries that a rank takes and gives in a step of `tokens` computed tokens."""
    boundaries = exchanges(model, schedule)
    each = model.boundary_bytes_per_token * tokens // sweeps
    return each * sum(e.takes is not None for e in boundaries), each * sum(e.gives is not None for e in boundaries)
