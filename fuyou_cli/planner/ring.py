"""Deals a model's stages to ranks, and tells what crosses between them.

Ranks form a ring: each computes all micro-batches of its own stages, and sends each output to the rank that computes the next
stage. In backward the gradient of an output goes the other way. Weights, gradients of weights and states never cross. A rank
plans and runs its own view of the model (`ModelSpec.of_rank`), so nothing else here knows of owners.

Embeddings and the first block belong together: the model's own forward adds tables up, scales and masks between them. So do the
norm and the head, and with a tied head all of these. Of a head that is cut, pieces behind the first may be other ranks', as
blocks are: what the pieces so far have seen of each token goes on from one to the next, and the sum of the hidden state's
gradient comes back in the same order in which one process adds it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ..core.errors import UsageError
from ..spec.model import ITEM_SIZE, ModelSpec, StageSpec
from .schedule import Schedule, Visit

OTHER_RANKS = "other ranks"  # name of the stall where all meet
AMONG_REPLICAS = "gradients of other ranks"  # and where replicas add up what they train
SEEN = 3  # float32 numbers of each token that pieces of a head have found (`engine/loss.TokenLoss`)


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
    of its vocabulary; at the end the head, or each of its pieces."""
    by_call: list[list[int]] = []
    for stage in model.stages:
        first, _ = stage.vocabulary or (0, 0)
        goes_on = stage.expert_range is not None or (first > 0 and stage.kind == "embedding")
        if goes_on:
            by_call[-1].append(stage.index)
        else:
            by_call.append([stage.index])
    return by_call


def groups(model: ModelSpec) -> list[list[int]]:
    """Lists the stages that one rank must have together: those up to the first block, each block, those behind the last block
    with the head or its first piece, and each other piece. With a tied head all behind the last block are the first ones'."""
    listed = calls(model)
    blocks = [number for number, call in enumerate(listed) if model.stages[call[0]].kind == "block"]
    first, *others = blocks
    front = [stage for call in listed[: first + 1] for stage in call]
    ends = listed[blocks[-1] + 1 :]
    pieces = [call for call in ends if model.stages[call[0]].kind == "head"][1:] if may_part(model) else []
    back = [stage for call in ends[: len(ends) - len(pieces)] for stage in call]
    between = [
        [stage for call in listed[begin + 1 : end + 1] for stage in call] for begin, end in zip(blocks, others, strict=False)
    ]
    return [front + back, *between] if model.tied_head else [front, *between, back, *pieces]


def may_part(model: ModelSpec) -> bool:
    """Tells whether pieces of the head may be several ranks': it has pieces, no embedding has their weights, and what crosses
    is as wide as the model."""
    widths = {tensor.shape[-1] for tensor in model.stages[-1].tensors if len(tensor.shape) > 1}
    return model.head_is_cut and not model.tied_head and widths <= {model.hidden_size}


def work(stage: StageSpec, *, cut_head: bool) -> float:
    """Returns the FLOPs that a stage computes in a step, for one micro-batch."""
    forward = 0.0 if stage.kind == "embedding" else stage.forward_flops
    if stage.kind == "head":
        return (4.0 if cut_head else 3.0) * forward - stage.frozen_flops
    return forward + (3.0 * forward - stage.frozen_flops - stage.unneeded_flops) * stage.goes_back


def deal(
    model: ModelSpec, ranks: int, seconds: Sequence[float] | None = None, *, at_a_turn: int = 1, head_in_turn: bool = False
) -> tuple[int, ...]:
    """Returns the rank of each stage: as much time for each rank, and in turn, so that a rank computes one stage's
    micro-batches while another computes those before. `seconds`: what each stage takes in a step; None: its FLOPs tell.
    `at_a_turn`: how many blocks a rank has in a row. With more of them less crosses, and ranks wait longer for their first.

    The first rank has the embeddings, the last one the head, unless it is tied; `head_in_turn`: its first piece, and the ranks
    after it have the others, in turn. Blocks go to the rank that lacks most of its share so far."""
    check_ranks(model, ranks)
    times = [work(stage, cut_head=model.head_is_cut) for stage in model.stages] if seconds is None else seconds
    front, *others = groups(model)
    behind = [group for group in others if model.stages[group[-1]].kind != "block"]
    others = others[: len(others) - len(behind)]
    ends = [(group, (ranks - 1 + number * head_in_turn) % ranks) for number, group in enumerate(behind)]
    blocks = [[stage for stage in front if model.stages[stage].kind == "block"], *others]
    load = [0.0] * ranks
    load[0] += sum(times[stage] for stage in front if stage not in blocks[0])
    for group, rank in ends:
        load[rank] += sum(times[stage] for stage in group)
    weights = [sum(times[stage] for stage in block) for block in blocks]
    shares = _shares(load, sum(weights))
    dealt = _in_turn(weights, shares)
    for rank in set(range(ranks)) - set(dealt):  # each rank has a block
        most = max(range(ranks), key=lambda other: dealt[1:].count(other))
        dealt[max(number for number, other in enumerate(dealt) if other == most)] = rank
    if at_a_turn > 1:
        dealt = _in_rows([dealt.count(rank) for rank in range(ranks)], at_a_turn)
    owners = [0] * len(model.stages)
    for stages, rank in ((front, 0), *ends, *zip(others, dealt[1:], strict=True)):
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
    """Raises UsageError unless every stage has an owner, every rank a block, and what belongs together one owner: a tied head
    stays with its embedding, a whole head or the first piece of one with the norm."""
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
        return visit.sweep, visit.phase in ("head", "backward"), of[visit.stage], visit.again

    found: list[Exchange] = []
    for (_, backward, number, again), of_call in groupby(schedule.visits, turn):
        visits = list(of_call)
        if backward:
            takes = _after(model, listed, number, backward=True)
            gives = _before(model, listed, number, backward=True) if _passes_on(model, listed, number) else None
            if visits[0].phase == "head" and not model.head_is_cut and not again:  # forward as well
                takes = _before(model, listed, number, backward=False)
        else:
            takes, gives = (of_side(model, listed, number, backward=False) for of_side in (_before, _after))
        for place, _ in enumerate(visits):
            found.append(Exchange(takes if place == 0 else None, gives if place == len(visits) - 1 else None))
    return tuple(found)


def _passes_on(model: ModelSpec, listed: list[list[int]], number: int) -> bool:
    """Tells whether what comes before a call needs a gradient. A head's piece always goes on with what others have summed."""
    stage = model.stages[listed[number][0]]
    if not number or stage.kind != "head":
        return bool(number) and stage.passes_on
    before = model.stages[listed[number - 1][-1]]
    return before.kind == "head" or before.goes_back


def _before(model: ModelSpec, listed: list[list[int]], number: int, *, backward: bool) -> Boundary | None:
    """Returns what crosses between a call and the one before it; None where both are here."""
    return None if number == 0 else _crossing(model, listed[number - 1][0], model.owners[listed[number - 1][0]], backward)


def _after(model: ModelSpec, listed: list[list[int]], number: int, *, backward: bool) -> Boundary | None:
    """Returns what crosses between a call and the one after it; None where both are here."""
    is_last = number + 1 == len(listed)
    return None if is_last else _crossing(model, listed[number][0], model.owners[listed[number + 1][0]], backward)


def _crossing(model: ModelSpec, stage: int, peer: int, backward: bool) -> Boundary | None:
    return None if peer == model.rank else Boundary(stage, backward, peer)


def of_pieces(model: ModelSpec, boundary: Boundary) -> bool:
    """Tells whether it crosses between two pieces of the head."""
    return model.stages[boundary.stage].kind == "head"


def has_hidden(model: ModelSpec, boundary: Boundary) -> bool:
    """Tells whether what a head's piece gives to the next has the last hidden state, too: that rank had no piece so far."""
    first = next(stage.index for stage in model.stages if stage.kind == "head")
    next_owner = model.owners[boundary.stage + 1]
    return not boundary.backward and next_owner not in model.owners[first : boundary.stage + 1]


def bytes_per_token(model: ModelSpec, boundary: Boundary) -> int:
    """Returns the bytes of each token that cross."""
    if not of_pieces(model, boundary):
        return model.boundary_bytes_per_token
    state = 4 if boundary.backward else ITEM_SIZE[model.compute_dtype] * has_hidden(model, boundary)
    return 4 * SEEN + state * model.hidden_size
