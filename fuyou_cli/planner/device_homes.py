"""Computes what rests on a device with its own memory: everything that the updates of some stages read and write.

The weights and states of such a stage lie in one allocation on the device, with its gradients if these rest. A step copies none
of it; the update runs on the device. A commit copies it to the store through a few small slots of the arena.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.units import align_up
from ..spec.model import ModelSpec
from ..spec.plan import Span, StagePlan, Tier
from .defer import deferrals
from .device import UPDATE_CHUNK, UPDATE_SCRATCH
from .placement_context import STORE_UNIT, SpanAllocator
from .plan_request import PlanRequest

STAGING_SLOTS = 4  # one is filled, one is checksummed, one is written, one waits
STAGING_PIECE = 4 << 20  # bytes of a slot at most


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceHomes:
    """Holds the bytes of the device that stages resting there take, in addition to their weights."""

    states: int = 0
    # Gradients that rest: until a deferred update, from a tied head's backward to the embedding's, or between sweeps.
    gradients: int = 0
    scratch: int = 0  # memory in which one chunk of an update is computed


def device_homes(model: ModelSpec, request: PlanRequest, there: set[int], resting: set[int]) -> DeviceHomes:
    """Sums up the memory of the stages `there`. `resting`: those of them whose gradients rest."""
    dtype = request.numerics.accumulate_dtype
    return DeviceHomes(
        states=sum(model.stages[stage].state_bytes for stage in there),
        gradients=sum(model.stages[stage].gradient_bytes(dtype) for stage in there & resting),
        scratch=update_scratch(max((model.stages[stage].trained for stage in there), default=0)),
    )


def update_scratch(largest: int) -> int:
    """Returns the bytes of the device in which updates are computed. `largest`: parameters of the largest stage that is updated
    there."""
    return 4 * UPDATE_SCRATCH * min(largest, UPDATE_CHUNK)


def gradients_rest(model: ModelSpec, stage: StagePlan, sweeps: int) -> bool:
    """Tells whether the stage's gradients need a home on the device."""
    return stage.updated_there and (stage.deferred or model.has_two_users(stage.stage) or sweeps > 1)


def gradients_would_rest(model: ModelSpec, request: PlanRequest) -> tuple[bool, ...]:
    """Tells, for every stage, whether its gradients would need a home on the device if the stage were updated there."""
    together = zip(model.stages, deferrals(model, request), strict=True)
    return tuple(deferred or model.has_two_users(stage.index) or request.is_swept for stage, deferred in together)


def summing_spans(model: ModelSpec, resting: set[int], sweeps: int) -> int:
    """Returns how many spans sum gradients that do not rest on the device. Stages use two in turn. A tied head that is not cut
    holds one more. With several sweeps one more is uploaded for the next visit."""
    stays = model.tied_head and not model.head_is_cut and 0 not in resting
    return 2 + int(stays) + int(sweeps > 1)


def staging_slots(arena: SpanAllocator, model: ModelSpec, states: tuple[Tier, ...]) -> tuple[Span, ...]:
    """Returns the slots through which states are copied to the host and back, by commits and outside of steps."""
    there = [stage.params for stage, tier in zip(model.stages, states, strict=True) if tier == "gpu"]
    if not any(there):
        return ()
    largest = align_up(4 * max(there), STORE_UNIT)  # bytes of momentum, or of variance
    return tuple(arena.take(min(STAGING_PIECE, largest)) for _ in range(STAGING_SLOTS))


def stages_there(model: ModelSpec, request: PlanRequest) -> set[int]:
    """Returns the stages that the request puts on the device."""
    if request.device_states is not None:
        return {stage for stage in request.device_states if model.stages[stage].params}
    return {stage.index for stage in model.stages if stage.params} if request.states == "gpu" else set()
