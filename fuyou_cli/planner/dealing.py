"""Deals stages to ranks by the time that they take on a rank's own machine: compute, updates on its processor, its drives.

Which of these binds depends on what a rank has: an embedding takes hardly any compute, but as long to update as three blocks.
So a few deals are made, by compute, by parameters and by what lies between, and the one whose slowest rank is the fastest is
taken. Times are those of the stages alone: what rests where is not planned yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..spec.hardware import HardwareProfile
from ..spec.model import ModelSpec, StageSpec
from .bound import store_seconds
from .costs import Costs
from .plan_request import PlanRequest
from .ring import deal, work

_MIXES = (1.0, 0.75, 0.5, 0.25, 0.0)  # share of compute in what stages are dealt by; the rest is their parameters'
_OVERLAP = 0.05  # share of a rank's other times that it takes longer: of two deals with as long a rank, the one with less work
_RESTING = 0.8  # share of a memory that holds weights and states; the rest is slots and compute


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTime:
    """What one stage adds to its rank's step. Seconds are without anything beside. Bytes are those at rest, and those that
    cross from and to the drives if it rests there."""

    compute: float
    update: float  # with all threads
    resting: int
    read: int
    written: int


def stage_times(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest) -> list[StageTime]:
    """Returns the times of each stage on a rank's machine."""
    costs = Costs.of(model, hardware, request)
    return [_stage_time(costs, stage) for stage in model.stages]


def _stage_time(costs: Costs, stage: StageSpec) -> StageTime:
    update = costs.processor_update_seconds(stage.trained) / costs.updates_at_once
    sweeps = costs.sweeps
    passes = 1 + stage.goes_back if stage.weights_in_backward else 1
    return StageTime(
        compute=_compute_seconds(costs, stage),
        update=update,
        resting=stage.weight_bytes + stage.state_bytes,
        read=passes * sweeps * stage.weight_bytes * (not stage.looked_up) + stage.state_bytes,
        written=stage.trained_weight_bytes + stage.state_bytes,
    )


def _compute_seconds(costs: Costs, stage: StageSpec) -> float:
    """Returns the seconds of all micro-batches of a step, with nothing kept, of blocks and heads: others multiply no matrices.
    Without any rate, a FLOP takes a second."""
    if stage.kind == "embedding" or not stage.forward_flops:
        return 0.0
    rate = costs.rate(stage)
    if not (rate.forward and rate.backward):
        return work(stage, cut_head=costs.model.head_is_cut)
    phases = ["forward", *["backward"] * stage.goes_back]
    if stage.kind == "head":
        phases = [*["logits"] * costs.model.head_is_cut, "head"]
    numerics = costs.numerics
    shape = numerics.micro_batch_tokens, numerics.max_seq_len
    return numerics.micro_batches * sum(costs.micro_batch_seconds(stage, phase, *shape) for phase in phases)


def fastest_deal(model: ModelSpec, hardware: HardwareProfile, request: PlanRequest, ranks: int) -> tuple[int, ...]:
    """Returns the rank of each stage. `hardware` and `request` are those of one rank; all ranks are taken to be alike."""
    times = stage_times(model, hardware, request)
    compute, size = sum(time.compute for time in times) or 1.0, sum(time.resting for time in times) or 1
    deals = dict.fromkeys(
        deal(model, ranks, [mix * time.compute / compute + (1 - mix) * time.resting / size for time in times]) for mix in _MIXES
    )
    return min(deals, key=lambda owners: slowest(owners, times, hardware, request))


def slowest(owners: Sequence[int], times: Sequence[StageTime], hardware: HardwareProfile, request: PlanRequest) -> float:
    """Estimates the seconds of the slowest rank's step."""
    ranks = range(max(owners) + 1)
    return max(
        _rank_seconds([t for t, owner in zip(times, owners, strict=True) if owner == r], hardware, request) for r in ranks
    )


def _rank_seconds(times: Sequence[StageTime], hardware: HardwareProfile, request: PlanRequest) -> float:
    """Estimates a rank's step: its longest time, and a little of the others. What a GPU has room for is updated there, and what
    RAM has room for does not cross."""
    resting = sum(time.resting for time in times) or 1
    on_device = min(1.0, _RESTING * (request.gpu_budget or 0) / resting) if request.device == "cuda" else 0.0
    on_ssd = max(0.0, 1.0 - on_device - _RESTING * request.cpu_budget / resting)
    moved = [int(on_ssd * sum(getattr(time, way) for time in times)) for way in ("read", "written")]
    found = [
        sum(time.compute for time in times),
        (1 - on_device) * sum(time.update for time in times),
        *store_seconds(hardware.lasting() if request.sustained else hardware, *moved).values(),
    ]
    return max(found) + _OVERLAP * sum(found)
