"""Several ranks that train one model together: who computes which stage, what crosses between them, and a step of all of them,
simulated.

Ranks form a ring: each computes all micro-batches of its own stages, and sends each output to the rank that computes the next
stage. In backward the gradient of an output goes the other way. Weights, gradients of weights and states never cross. A rank
plans and runs its own view of the model (`ModelSpec.of_rank`), so nothing else here knows of owners.

Embeddings and the first block belong together: the model's own forward adds tables up, scales and masks between them. So do the
norm and the head, and with a tied head all of these. Of a head that is cut, pieces behind the first may be other ranks', as
blocks are: what the pieces so far have seen of each token goes on from one to the next, and the sum of the hidden state's
gradient comes back in the same order in which one process adds it up.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import inf

from ..core.errors import PlanError, UsageError
from ..spec.hardware import HardwareProfile, Network
from ..spec.model import ITEM_SIZE, ModelSpec, StageSpec
from ..spec.plan import Plan
from .bound import store_seconds
from .costs import Costs
from .place import plan as first_that_fits
from .plan_request import PlanRequest
from .schedule import Schedule, Visit, plan_schedule
from .simulate import STEPS, Before, SimulatedRun, Timeline, begun

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


# ---- a step of all ranks, simulated ----------------------------------------------------------------------------------
#
# Every rank has a machine and a clock of its own. Visits run in the order that all ranks share, so whatever a visit waits for
# was sent by one that has run. What crosses does so as in `engine/link`: a rank takes a visit's micro-batches one by one, and
# posts for them when the visit before has its weights, for sums of a head's pieces when all that it sent has left; it sends a
# micro-batch when what it sent of it before has left; a message moves once both sides are ready for it. A head and a norm in
# one visit each wait as they do there. Once in a step all ranks meet.

_MOST_PARTS = 16  # in which a boundary crosses, if it has more micro-batches
_MEETING = 1e-3  # seconds in which a rank's Python tells and learns what a step found, beside the messages


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """A rank's view of the model, its part of a machine, and its plan."""

    model: ModelSpec
    hardware: HardwareProfile
    plan: Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class RingTimeline:
    """Describes one steady-state step of all ranks. `sent`: bytes of boundaries that each rank sends; `link_seconds`: in which
    the busiest direction of any box's link carries them."""

    step_seconds: float
    ranks: tuple[Timeline, ...]
    sent: tuple[int, ...]
    link_seconds: float


def simulate_ring(ranks: Sequence[RankPlan], network: Network, *, steps: int = STEPS) -> RingTimeline:
    """Returns the last of `steps` steps, without commits that are more than a step apart."""
    wires = _Wires(network)
    rings = [_Rank(number, one, wires) for number, one in enumerate(ranks)]
    wires.ranks = rings
    for _ in range(1, steps):
        _step(rings)
    before, begin, busy = [Before(one.run) for one in rings], rings[0].met, dict(wires.busy)
    sent = [one.sent for one in rings]
    forward = _step(rings)
    timeline = RingTimeline(
        step_seconds=rings[0].met - begin,
        ranks=tuple(was.timeline(one.run, seconds) for was, one, seconds in zip(before, rings, forward, strict=True)),
        sent=tuple(one.sent - was for one, was in zip(rings, sent, strict=True)),
        link_seconds=max(
            (seconds - busy.get(port, 0.0) for port, seconds in wires.busy.items() if port[0] == "out"), default=0.0
        ),
    )
    for one in rings:
        one.run.let_go()
    return timeline


def _step(rings: Sequence[_Rank]) -> list[float]:
    """Runs one step of all ranks. Returns the seconds of forward of each."""
    for one in rings:
        one.begin_step()
    in_order = heapq.merge(*([(_order(visit), number) for visit in one.visits] for number, one in enumerate(rings)))
    measured = False
    for order, number in in_order:
        if order[1] and not measured:  # the norm is known before the second backward
            measured = True
            _meet(rings)
        rings[number].visit()
    for one in rings:
        one.run.settle()
    if not measured:
        _meet(rings)
    for one in rings:
        one.end_step()
    return [one.forward for one in rings]


def _order(visit: Visit) -> tuple[int, bool, int, int]:
    """Returns what all ranks' visits are ordered by."""
    phase = ("forward", "logits", "head", "backward").index(visit.phase)
    return visit.sweep, visit.again, phase, visit.stage if phase < 2 else -visit.stage


def _meet(rings: Sequence[_Rank]) -> None:
    """Lets all ranks wait for the last one."""
    wires = rings[0].wires
    for one in rings:
        one.run.settle()
    met = max(one.run.machine.now for one in rings) + _MEETING + 2 * wires.network.latency
    for one in rings:
        one.run.wait_until_time(met, OTHER_RANKS)
        one.met = met


class _Wires:
    """Carries messages. Each box has a port out and one in; between ranks of one box there is a wire for each pair. Messages
    take turns at a port."""

    def __init__(self, network: Network) -> None:
        self.network, self.ranks = network, list[_Rank]()
        self.busy: dict[tuple[str, int, int], float] = {}  # seconds by port
        self._free: dict[tuple[str, int, int], float] = {}  # when it is

    def carry(self, sender: int, receiver: int, size: float, at: float) -> float:
        """Returns when a message has arrived that both sides are ready for at some time."""
        network, (one, other) = self.network, (self.network.box(rank) for rank in (sender, receiver))
        ports = (("within", sender, receiver),) if one == other else (("out", one, 0), ("in", other, 0))
        rate, latency = network.way(sender, receiver)
        begin = max(at + latency, *(self._free.get(port, 0.0) for port in ports))
        for port in ports:
            self._free[port] = begin + size / rate
            self.busy[port] = self.busy.get(port, 0.0) + size / rate
        return begin + size / rate + latency


@dataclass(slots=True)
class _Rank:
    """One rank: the link of its run (`simulate.LinkOfVisits`)."""

    number: int
    planned: RankPlan
    wires: _Wires
    sent: int = 0  # bytes
    met: float = 0.0  # when all ranks last met
    forward: float = 0.0  # seconds of the step's forward visits
    run: SimulatedRun = field(init=False)
    visits: tuple[Visit, ...] = field(init=False)
    _exchanges: tuple[Exchange, ...] = field(init=False)
    _exchange: Exchange = NOTHING  # of the visit under way
    _visit: Visit | None = None
    _parts: int = 1
    _posted: dict[int, float] = field(default_factory=dict)  # by visit
    _arrivals: dict[int, list[float]] = field(default_factory=dict)  # by visit
    # By part: to whom it was sent last, and when it is there.
    _leaving: dict[int, tuple[int, float]] = field(default_factory=dict)
    _steps: int = 0

    def __post_init__(self) -> None:
        one = self.planned
        schedule: Schedule = plan_schedule(one.model, one.plan)
        self.run = begun(one.model, one.hardware, one.plan, schedule)
        self.run.link, self.visits = self, schedule.visits
        self._exchanges = exchanges(one.model, schedule)
        self._parts = min(_MOST_PARTS, self.run.costs.micro_batches)

    def begin_step(self) -> None:
        self._steps += 1
        self.run.generation = self._steps
        self.run.lookahead.begin_step(last=False)
        self._posted.clear()
        self._arrivals.clear()
        self.forward = 0.0

    def visit(self) -> None:
        begin = self.run.machine.now
        visit = self.run.visit()
        self._visit = None
        if visit.phase == "forward":
            self.forward += self.run.machine.now - begin
        gives = self._exchange.gives
        if gives is not None and self._leaves_whole(visit, gives):
            for _ in range(self._parts):
                self._send(visit, gives)

    def end_step(self) -> None:
        for part in list(self._leaving):
            self._wait_left(part)
        self.run.residency.update_later(True)

    # ---- a visit (`simulate.LinkOfVisits`) -----------------------------------------------------------------------------------

    def turn(self, visit: Visit) -> None:
        takes = self._exchanges[visit.index].takes
        if takes is None:
            return
        if self._are_sums(visit.index):
            for part in list(self._leaving):
                self._wait_left(part)
        elif visit.phase in ("logits", "head") and not of_pieces(self.planned.model, takes):  # computed from all rows at once
            self._wait(takes, self._arrivals[visit.index][-1])

    def enter(self, visit: Visit) -> int:
        self._visit, self._exchange = visit, self._exchanges[visit.index]
        ahead = visit.index + 1
        if ahead < len(self.visits) and self.visits[ahead].sweep == visit.sweep and not self._are_sums(ahead):
            self._posted[ahead] = self.run.machine.now
        return self._parts if self._exchange != NOTHING else 0

    def before(self, part: int) -> None:
        takes = self._exchange.takes
        if takes is None or self._visit is None:
            return
        # A separate device is given a micro-batch when the next one's upload has begun.
        part = part if self.run.device is None else min(part + 1, self._parts - 1)
        self._wait(takes, self._arrivals[self._visit.index][part])

    def after(self, part: int) -> None:
        gives = self._exchange.gives
        if gives is not None and self._visit is not None and not self._leaves_whole(self._visit, gives):
            self._send(self._visit, gives)

    def _leaves_whole(self, visit: Visit, gives: Boundary) -> bool:
        """Tells whether a visit gives what its last part has completed: a head the gradient of another stage's output."""
        return visit.phase == "head" and not of_pieces(self.planned.model, gives)

    def _are_sums(self, visit: int) -> bool:
        """Tells whether a visit takes what it sends on from the same memory."""
        takes = self._exchanges[visit].takes
        return takes is not None and takes.backward and of_pieces(self.planned.model, takes)

    def _wait(self, takes: Boundary, time: float) -> None:
        self.run.wait_until_time(time, f"boundary of rank {takes.peer}")

    # ---- sending -------------------------------------------------------------------------------------------------------

    def _send(self, visit: Visit, gives: Boundary) -> None:
        """Sends the next part of what a visit gives. All that the receiver does before has run; it is ready once it has posted
        the visit that takes this."""
        peer = self.wires.ranks[gives.peer]
        takes = peer.run.lookahead.cursor + 1
        expected = peer._exchanges[takes].takes
        assert expected is not None and expected.peer == self.number, (visit, gives, expected)
        arrivals = peer._arrivals.setdefault(takes, [])
        self._wait_left(len(arrivals))
        model, boundary = self.planned.model, self.run.costs.boundary
        size = boundary * bytes_per_token(model, gives) / model.boundary_bytes_per_token / self._parts
        at = max(self.run.machine.now + self._down(size), peer.posted(takes))
        arrives = self.wires.carry(self.number, gives.peer, size, at)
        self._leaving[len(arrivals)] = gives.peer, arrives
        arrivals.append(arrives)
        self.sent += int(size)

    def _down(self, size: float) -> float:
        """Returns the seconds in which a part comes down from a separate device."""
        rate = self.run.costs.hardware.d2h
        return size / rate if self.run.device is not None and rate else 0.0

    def posted(self, visit: int) -> float:
        """Returns when what a visit takes was posted: when it is asked for, where the visit before is of another sweep."""
        return self._posted.get(visit, self.run.machine.now)

    def _wait_left(self, part: int) -> None:
        if part in self._leaving:
            peer, arrives = self._leaving.pop(part)
            self.run.wait_until_time(arrives, f"boundary to rank {peer}")


# ---- who computes what, by the time that it takes --------------------------------------------------------------------
#
# Stages take their time on a rank's own machine: compute, updates on its processor, its drives. Which of these binds depends on
# what a rank has: an embedding takes hardly any compute, but as long to update as three blocks. So a few deals are made, by
# compute, by parameters and by what lies between, and the one whose slowest rank is the fastest is taken. Times are those of
# the stages alone: what rests where is not planned yet. All ranks wait while one computes the head: so its compute is
# everybody's, and blocks are dealt by compute as if it took none.
#
# Then a rank gets as many blocks in a row as its network asks for. With one at a turn every output crosses, while all ranks
# compute. With more of them less crosses, but a rank computes all micro-batches of a block before the next one's first, and the
# others wait meanwhile: that is for links so slow that compute hardly counts.
#
# The pieces of a head that is cut are one rank's, or go round like blocks, so that nobody waits for all of them. Each then
# takes a float32 sum of all rows from another rank, which pays over fast links: a step of all is simulated both ways. A head is
# not cut for that: where it is cut decides results.

_MIXES = (1.0, 0.75, 0.5, 0.25, 0.0)  # share of compute in what stages are dealt by; the rest is their parameters'
_OVERLAP = 0.05  # share of a rank's other times that it takes longer: of two deals with as long a rank, the one with less work
_FASTER = 0.01  # share of a step by which pieces of the head in turn have to be faster
_RESTING = 0.8  # share of a memory that holds weights and states; the rest is slots and compute


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTime:
    """What one stage adds to its rank's step. Seconds are without anything beside. Bytes are those at rest, and those that
    cross from and to the drives if it rests there."""

    forward: float  # compute
    backward: float
    update: float  # with all threads
    resting: int
    read: int
    written: int
    waited_for: bool = False  # all other ranks wait while it computes

    @property
    def compute(self) -> float:
        return self.forward + self.backward


def stage_times(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> list[StageTime]:
    """Returns the times of each stage on a rank's machine."""
    costs = Costs.of(model, hardware, request)
    return [_stage_time(costs, stage) for stage in model.stages]


def _stage_time(costs: Costs, stage: StageSpec) -> StageTime:
    update = costs.processor_update_seconds(stage.trained) / costs.updates_at_once
    sweeps = costs.sweeps
    passes = 1 + stage.goes_back if stage.weights_in_backward else 1
    forward, backward = _compute_seconds(costs, stage)
    return StageTime(
        forward=forward,
        backward=backward,
        update=update,
        resting=stage.weight_bytes + stage.state_bytes,
        read=passes * sweeps * stage.weight_bytes * (not stage.looked_up) + stage.state_bytes,
        written=stage.trained_weight_bytes + stage.state_bytes,
        waited_for=stage.kind == "head",
    )


def _compute_seconds(costs: Costs, stage: StageSpec) -> tuple[float, float]:
    """Returns the seconds of all micro-batches of a step, with nothing kept, of blocks and heads: others multiply no matrices.
    Without any rate, a FLOP takes a second."""
    if stage.kind == "embedding" or not stage.forward_flops:
        return 0.0, 0.0
    rate = costs.rate(stage)
    if not (rate.forward and rate.backward):
        return 0.0, work(stage, cut_head=costs.model.head_is_cut)
    numerics = costs.numerics

    def seconds(phase: str) -> float:
        shape = numerics.micro_batch_tokens, numerics.max_seq_len
        return numerics.micro_batches * costs.micro_batch_seconds(stage, phase, *shape)

    if stage.kind == "head":
        return seconds("logits") * costs.model.head_is_cut, seconds("head")
    return seconds("forward"), seconds("backward") * stage.goes_back


def fastest_deal(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest, network: Network) -> tuple[int, ...]:
    """Returns the rank of each stage. `hardware` and `request` are those of one rank; all ranks are taken to be alike."""
    with_head = _deal(model, hardware, request, network)
    if network.ranks == 1 or not may_part(model) or not _may_go_round(model, hardware, request, network):
        return with_head
    in_turn = _deal(model, hardware, request, network, head_in_turn=True)
    seconds = [_simulated_seconds(model, hardware, request, network, owners) for owners in (with_head, in_turn)]
    return in_turn if seconds[1] < (1 - _FASTER) * seconds[0] else with_head


def _may_go_round(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest, network: Network) -> bool:
    """Tells whether pieces of the head may be faster in turn: their sums take the link less time than one rank has for all."""
    times, size = stage_times(model, hardware, request), 4 * model.hidden_size * request.numerics.micro_batch_tokens
    chain, pieces = _Chain.of(model, times, request, network), [time for time in times if time.waited_for]
    crossing = tuple(network.seconds(rank, (rank + 1) % network.ranks, size) for rank in range(network.ranks))
    backward = sum(time.backward for time in pieces) / len(pieces) / chain.sweeps
    return chain.sweeps * replace(chain, blocks=len(pieces), crossing=crossing)._pass(backward, backward, 1) < chain.rest


def _simulated_seconds(
    model: ModelSpec, hardware: HardwareProfile, request: PlanRequest, network: Network, owners: tuple[int, ...]
) -> float:
    """Simulates a step of all ranks, by the first plans that fit. Endless where one does not."""
    alike = replace(request, sweeps=request.sweeps or 1, norm_first=bool(request.norm_first))
    views = [model.of_rank(owners, rank) for rank in range(network.ranks)]
    try:
        ranks = [RankPlan(model=view, hardware=hardware, plan=first_that_fits(view, hardware, alike)) for view in views]
    except PlanError:
        return inf
    return simulate_ring(ranks, network).step_seconds


def _deal(
    model: ModelSpec, hardware: HardwareProfile, request: PlanRequest, network: Network, *, head_in_turn: bool = False
) -> tuple[int, ...]:
    times, ranks = stage_times(model, hardware, request), network.ranks
    shared, size = [0.0 if time.waited_for else time.compute for time in times], sum(time.resting for time in times) or 1
    mixes = [
        [mix * own / (sum(shared) or 1.0) + (1 - mix) * time.resting / size for own, time in zip(shared, times, strict=True)]
        for mix in _MIXES
    ]

    def longest(mix: list[float]) -> float:
        return slowest(deal(model, ranks, mix, head_in_turn=head_in_turn), times, hardware, request)

    best = min(mixes, key=lambda mix: float(f"{longest(mix):.6g}"))  # by compute, of those alike but for rounding
    chain, least = _Chain.of(model, times, request, network), longest(best)
    chain = replace(chain, rest=chain.rest / ranks) if head_in_turn else chain
    row = min(chain.turns(), key=lambda row: chain.seconds(row, least))
    return deal(model, ranks, best, at_a_turn=row, head_in_turn=head_in_turn)


def chain_seconds(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest, network: Network) -> float:
    """Estimates the step of all ranks if nothing but compute and the network binds: micro-batches may be too few or too large
    to keep ranks at work. `model`: the whole one."""
    chain = _Chain.of(model, stage_times(model, hardware, request), request, network)
    return min(chain.seconds(row, 0.0) for row in chain.turns())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chain:
    """Estimates the compute of a step of all ranks in turn: blocks alike, `forward` and `backward` seconds of one for all of a
    sweep's micro-batches, and `crossing`: seconds in which one micro-batch's output crosses from each rank to the next."""

    blocks: int
    ranks: int
    micro_batches: int
    sweeps: int
    forward: float
    backward: float
    rest: float  # seconds of heads, for which all wait
    ahead: bool  # a device begins with a micro-batch when it has the next as well
    crossing: tuple[float, ...]

    @classmethod
    def of(cls, model: ModelSpec, times: Sequence[StageTime], request: PlanRequest, network: Network) -> _Chain:
        blocks = sum(stage.kind == "block" and stage.expert_range is None for stage in model.stages)
        sweeps, ranks = request.sweeps or 1, network.ranks
        in_blocks = [time for stage, time in zip(model.stages, times, strict=True) if stage.kind == "block"]
        size = model.boundary_bytes_per_token * request.numerics.micro_batch_tokens
        return cls(
            blocks=blocks,
            ranks=ranks,
            micro_batches=max(1, request.numerics.micro_batches // sweeps),
            sweeps=sweeps,
            forward=sum(time.forward for time in in_blocks) / blocks / sweeps,
            backward=sum(time.backward for time in in_blocks) / blocks / sweeps,
            rest=sum(time.compute for time in times) - sum(time.compute for time in in_blocks),
            ahead=request.device != "cpu",
            crossing=tuple(network.seconds(rank, (rank + 1) % ranks, size) for rank in range(ranks)),
        )

    def turns(self) -> range:
        """Returns how many blocks a rank may have at a turn."""
        return range(1, max(1, self.blocks // self.ranks) + 1)

    def seconds(self, at_a_turn: int, least: float) -> float:
        """Returns the seconds if ranks have so many blocks at a turn. `least`: those of the slowest rank alone."""
        alone = self.sweeps * self.blocks * (self.forward + self.backward) / self.ranks + self.rest
        longer = max(1.0, least / alone) if alone else 1.0  # where its updates or drives bind
        passes = (self._pass(block, longer * block, at_a_turn) for block in (self.forward, self.backward))
        return self.sweeps * sum(passes) + self.rest

    def _pass(self, block: float, bound: float, at_a_turn: int) -> float:
        """Returns the seconds of one forward or backward. With one block at a turn, a turn takes the longest of a rank's own
        work, of a micro-batch's way through all ranks, and of the link's. With more, ranks hardly work at once: each has its
        first block when the last micro-batch has come, and the next rank begins with what its last block gives. `bound`:
        seconds of a block with what a rank does beside compute."""
        begins, link = (1 + self.ahead) * block / self.micro_batches, self.micro_batches * max(self.crossing)
        turns, on_the_way = self.blocks / (self.ranks * at_a_turn), sum(self.crossing) / self.ranks + begins
        if at_a_turn == 1:
            return turns * max(bound, self.ranks * on_the_way, link) + (self.ranks - 1) * on_the_way
        rows = turns * self.ranks
        return rows * (at_a_turn - 1) * bound + bound + (rows - 1) * (max(0.0, link - bound) + on_the_way)


def slowest(owners: Sequence[int], times: Sequence[StageTime], hardware: HardwareProfile, request: PlanRequest) -> float:
    """Estimates the seconds of the slowest rank's step."""
    if len({owner for time, owner in zip(times, owners, strict=True) if time.waited_for}) > 1:  # while others have pieces
        times = [replace(time, waited_for=False) for time in times]
    ranks, waited_for = range(max(owners) + 1), sum(time.compute for time in times if time.waited_for)
    of_ranks = ([time for time, owner in zip(times, owners, strict=True) if owner == rank] for rank in ranks)
    return max(_rank_seconds(own, waited_for, hardware, request) for own in of_ranks)


def _rank_seconds(times: Sequence[StageTime], waited_for: float, hardware: HardwareProfile, request: PlanRequest) -> float:
    """Estimates a rank's step: its longest time, and a little of the others. What a GPU has room for is updated there, and what
    RAM has room for does not cross. `waited_for`: seconds of compute here or elsewhere beside which no rank computes."""
    resting = sum(time.resting for time in times) or 1
    on_device = min(1.0, _RESTING * (request.gpu_budget or 0) / resting) if request.device == "cuda" else 0.0
    on_ssd = max(0.0, 1.0 - on_device - _RESTING * request.cpu_budget / resting)
    moved = [int(on_ssd * sum(getattr(time, way) for time in times)) for way in ("read", "written")]
    seconds = [
        waited_for + sum(time.compute for time in times if not time.waited_for),
        (1 - on_device) * sum(time.update for time in times),
        *store_seconds(hardware.lasting(), *moved).values(),  # what is written each step fills any fast region
    ]
    return max(seconds) + _OVERLAP * sum(seconds)
