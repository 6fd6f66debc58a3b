"""Deals stages to ranks by the time that they take on a rank's own machine: compute, updates on its processor, its drives.

Which of these binds depends on what a rank has: an embedding takes hardly any compute, but as long to update as three blocks.
So a few deals are made, by compute, by parameters and by what lies between, and the one whose slowest rank is the fastest is
taken. Times are those of the stages alone: what rests where is not planned yet. All ranks wait while one computes the head: so
its compute is everybody's, and blocks are dealt by compute as if it took none.

Then a rank gets as many blocks in a row as its network asks for. With one at a turn every output crosses, while all ranks
compute. With more of them less crosses, but a rank computes all micro-batches of a block before the next one's first, and the
others wait meanwhile: that is for links so slow that compute hardly counts.

The pieces of a head that is cut are one rank's, or go round like blocks, so that nobody waits for all of them. Each then takes
a float32 sum of all rows from another rank, which pays over fast links: a step of all is simulated both ways. A head is not cut
for that: where it is cut decides results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from ..core.errors import PlanError
from ..spec.hardware import HardwareProfile, Network
from ..spec.model import ModelSpec, StageSpec
from .bound import store_seconds
from .costs import Costs
from .place import plan as first_that_fits
from .plan_request import PlanRequest
from .ring import deal, may_part, work
from .simulated_ring import RankPlan, simulate_ring

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
