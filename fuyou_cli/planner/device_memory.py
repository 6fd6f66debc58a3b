"""Computes how much of a device's own memory a plan takes, and which weights may stay there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from ..spec.model import ModelSpec, StageSpec
from ..spec.plan import StagePlan
from .bound import uploads
from .boundary_layout import Kept, device_boundaries, device_bytes, every_operator, kept_bytes
from .costs import looked_up_bytes
from .device import WEIGHTS_ON_DEVICE, decode_scratch, decoded_at_once, square_lanes
from .device_homes import device_homes, gradients_rest, gradients_would_rest, stages_there, summing_spans
from .memory import (
    DEVICE_UNIT,
    HEAD_BYTES_PER_TOKEN,
    HEAD_STEP_BYTES_PER_TOKEN,
    balance_bytes,
    batch_slots,
    micro_boundary,
    micro_sums,
    range_sums,
    routing_bytes,
)
from .placement_context import SpanAllocator
from .plan_request import PlanRequest
from .schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Holds the most bytes that a plan takes of the device's memory."""

    homes: int = 0  # weights that rest there; if updates run in RAM, a copy is there too
    turns: int = 0  # spans for the weights of all other stages, used in turn
    decoded: int = 0  # quantised weights of the stage that computes, and memory to decode them in
    sums: int = 0  # spans in which gradients are summed (`summing_spans`), and the lanes of their squares
    states: int = 0  # states of stages that are updated there
    gradients: int = 0  # gradients of these stages that rest
    scratch: int = 0  # memory in which their updates are computed
    outputs: int = 0  # outputs of operators for all rows of a sweep, from forward to backward
    boundaries: int = 0  # inputs of stages for all rows of a sweep, from forward to backward
    routing: int = 0  # experts that tokens were sent to, for all rows of a sweep, from forward to backward
    # Whole-batch tensors between stages, if the batch stays there, and what the model's own forward makes of them.
    batch: int = 0
    compute: int = 0  # the pass that needs most for one micro-batch, with copies for its neighbours, and values for every token

    @property
    def total(self) -> int:
        updated = self.states + self.gradients + self.scratch
        weights = self.homes + self.turns + self.decoded
        return weights + self.sums + updated + self.outputs + self.boundaries + self.routing + self.batch + self.compute


def device_memory(model: ModelSpec, request: PlanRequest, stages: tuple[StagePlan, ...]) -> DeviceMemory:
    """Returns the device memory that these stages take, by kind."""
    found = _memory(
        model,
        request,
        {stage.stage for stage in stages if stage.weights == "gpu"},
        tuple(stage.kept for stage in stages),
        updated={stage.stage for stage in stages if stage.updated_there},
        resting={stage.stage for stage in stages if gradients_rest(model, stage, request.sweeps or 1)},
    )
    return replace(found, outputs=device_bytes(model, request.group, tuple(stage.kept_there for stage in stages)))


def _memory(
    model: ModelSpec,
    request: PlanRequest,
    at_home: Iterable[int],
    every_kept: Kept,
    *,
    updated: set[int],
    resting: set[int],
) -> DeviceMemory:
    """Sums up the memory without outputs that stay there. `at_home`: stages whose weights rest there; `every_kept`: the
    operators of each stage whose outputs rest with its boundary; `updated`: stages that are updated there; `resting`: those of
    them whose gradients rest."""
    if request.device == "cpu":
        return DeviceMemory()
    dtype = request.numerics.accumulate_dtype
    streamed = [stage.weight_bytes for stage in model.stages if stage.index not in at_home]
    taking_turns = [stage.gradient_bytes(dtype) for stage in model.stages if stage.index not in resting]
    spans = summing_spans(model, resting, request.sweeps or 1)
    sums = spans * max(taking_turns, default=0)
    homes = device_homes(model, request, updated, resting)
    decoded, lanes = _of_model(_Same(model))
    targets = HEAD_BYTES_PER_TOKEN * request.group.tokens if model.head_is_cut else 0
    if request.is_swept and model.head_is_cut:  # targets and losses of the whole step
        targets += HEAD_STEP_BYTES_PER_TOKEN * request.numerics.tokens
    targets += looked_up_bytes(model, request.numerics)
    if any(stage.choices for stage in model.stages):  # which tokens of the step are no padding
        targets += request.numerics.tokens
    return DeviceMemory(
        homes=sum(model.stages[stage].weight_bytes for stage in at_home),
        turns=WEIGHTS_ON_DEVICE * max(streamed, default=0),
        decoded=decoded,
        sums=sums + 8 * lanes,
        states=homes.states,
        gradients=homes.gradients,
        scratch=homes.scratch,
        boundaries=_boundaries(model, request),
        routing=routing_bytes(model, request),
        batch=_batch(model, request),
        compute=targets + max(map(partial(_pass_peak, model, request), model.stages, every_kept)),
    )


class _Same:
    """Stands for a model in a cache, where the model itself is compared and not what is in it."""

    def __init__(self, model: ModelSpec) -> None:
        self.model = model

    def __hash__(self) -> int:
        return id(self.model)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.model is other.model


@lru_cache(maxsize=4)
def _of_model(same: _Same) -> tuple[int, int]:
    """Returns the bytes in which quantised weights are decoded, and the lanes for the squares of its largest tensor."""
    model = same.model
    lanes = square_lanes(max(tensor.numel for stage in model.stages for tensor in stage.tensors))
    return model.decoded_bytes + decode_scratch(decoded_at_once(model)), lanes


def _boundaries(model: ModelSpec, request: PlanRequest) -> int:
    """Returns the bytes of boundaries that rest there. They do where the recipe says so, all of them."""
    there = [stage.index for stage in model.stages if stage.keeps_input and request.boundaries == "gpu"]
    return device_boundaries(model, request.group, there)[1]


def _batch(model: ModelSpec, request: PlanRequest) -> int:
    if not request.batch_on_device:
        return 0
    room = SpanAllocator(DEVICE_UNIT)
    batch_slots(room, model, request)
    return room.used + model.choreography_bytes_per_token * request.group.tokens


def with_batch(model: ModelSpec, request: PlanRequest) -> PlanRequest:
    """Decides whether the batch stays on the device. It stays if it fits beside spans for weights, sums, and the pass that
    needs most, whatever that pass keeps. Nothing else on the device saves more copies per byte. If the device's memory is not
    known, the batch does not stay. It always stays if boundaries rest there."""
    if request.batch_on_device is not None or request.device == "cpu":
        return request
    staying = replace(request, batch_on_device=True)
    if request.boundaries == "gpu":
        return staying
    if request.gpu_budget is None:
        return request
    fits = most_needed(model, staying).total <= request.gpu_budget
    return staying if fits else replace(request, batch_on_device=False)


def most_needed(model: ModelSpec, request: PlanRequest) -> DeviceMemory:
    """Returns the memory that a plan needs on the device at most, without what it may leave out. It is enough for any outputs
    that are kept with boundaries."""
    at_home = range(len(model.stages)) if request.weights == "gpu" else ()
    every_kept = request.kept if isinstance(request.kept, tuple) else every_operator(model)
    if request.kept == "none":
        every_kept = ((),) * len(model.stages)
    updated, rest = stages_there(model, request), gradients_would_rest(model, request)
    resting = {stage for stage in updated if rest[stage]}
    return _memory(model, request, {*at_home, *updated}, every_kept, updated=updated, resting=resting)


def bytes_left(model: ModelSpec, request: PlanRequest) -> int:
    """Returns the bytes of the device that a plan may fill, whatever it keeps in RAM. It is 0 on device cpu, whose memory is
    RAM, and for a device whose memory is not known."""
    if request.device == "cpu" or request.gpu_budget is None:
        return 0
    return max(0, request.gpu_budget - most_needed(model, request).total)


def _pass_peak(model: ModelSpec, request: PlanRequest, spec: StageSpec, outputs: tuple[int, ...]) -> int:
    """Returns the most bytes that a pass of one micro-batch needs: what it allocates itself, and what is copied for its
    neighbours at the same time.

    In backward, the next micro-batch's boundary, gradient and kept outputs arrive, and the gradient of the one before leaves.
    In forward, this input (which the stage does not allocate) and the next input are there, and the input, output and kept
    outputs of the one before leave. A cut head has the sums of all three, and the inputs of this one and the next. So have
    ranges of experts, and the block before them. If the batch stays on the device, only kept boundaries and outputs are copied.
    """
    one = request.group.batch_size <= request.numerics.micro_batch_size
    kept, boundary, balance = kept_bytes(spec, outputs), micro_boundary(model, request), balance_bytes(spec, request.numerics)
    if request.batch_on_device:
        arriving = (1 if one else 2) * boundary * spec.keeps_input
        # One more set of kept outputs than micro-batches that compute: a set is freed only after its copies end.
        return balance + max(
            spec.backward_peak + arriving + kept * (1 if one else 2), spec.forward_peak + kept * (1 if one else 2)
        )
    if spec.kind == "head" and model.head_is_cut:
        return spec.backward_peak + 2 * boundary + micro_sums(model, request) * (1 if one else 3)
    if spec.expert_range is not None or model.ranges(spec.index):
        balance += boundary + 2 * range_sums(model, request) // request.group.micro_batches
    if one:
        return balance + max(spec.backward_peak, spec.forward_peak + kept) + boundary
    return balance + max(spec.backward_peak + 3 * boundary + kept, spec.forward_peak + 4 * boundary + 2 * kept)


def with_homes_on_device(
    model: ModelSpec, request: PlanRequest, schedule: Schedule, stages: tuple[StagePlan, ...]
) -> tuple[StagePlan, ...]:
    """Lets weights that rest in RAM also stay on the device, as far as it has room beside all else. Weights that would be
    uploaded most often come first. It takes no room from anything else, so the plan is no slower. It changes nothing that the
    recipe pins, and keeps nothing on a device whose memory is not known."""
    if request.device == "cpu" or request.gpu_budget is None or request.weights is not None:
        return stages
    sizes = [stage.weight_bytes for stage in model.stages]
    again = {owner: times for owner, times in uploads(model, schedule.visits, stages).items() if times > 1}
    movable = [owner for owner in again if stages[owner].weights == "cpu"]
    order = sorted(movable, key=lambda owner: (-again[owner], sizes[owner], owner))
    turning = [size for owner, size in enumerate(sizes) if owner not in movable and stages[owner].weights != "gpu"]
    streamed = max(turning, default=0)
    beside = device_memory(model, request, stages)
    homes, left = sum(sizes[owner] for owner in order), request.gpu_budget - (beside.total - beside.turns)
    count = len(order)  # how many stay; with fewer streamed stages the spans may be smaller
    while count and homes + WEIGHTS_ON_DEVICE * streamed > left:
        count -= 1
        homes -= sizes[order[count]]
        streamed = max(streamed, sizes[order[count]])
    chosen = set(order[:count])
    return tuple(replace(stage, weights="gpu") if stage.stage in chosen else stage for stage in stages)
