"""Memory of a device with memory of its own: what a plan takes of it, and which weights may stay there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..spec.model import ITEM_SIZE, ModelSpec
from ..spec.plan import StagePlan
from .bound import uploads
from .boundary_layout import kept_bytes
from .device import WEIGHTS_ON_DEVICE, square_lanes
from .memory import HEAD_BYTES_PER_TOKEN, micro_boundary, micro_sums
from .plan_request import PlanRequest
from .schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Bytes at most."""

    homes: int = 0  # weights that rest there, beside their copy in RAM that updates write
    turns: int = 0  # weights of other stages, which take turns
    sums: int = 0  # gradients of two stages; a tied head that is not cut keeps a third through backward; lanes of their squares
    compute: int = 0  # the hungriest pass of one micro-batch beside its neighbours; what a cut head knows of every token

    @property
    def total(self) -> int:
        return self.homes + self.turns + self.sums + self.compute


def device_memory(model: ModelSpec, request: PlanRequest, stages: tuple[StagePlan, ...]) -> DeviceMemory:
    if request.device == "cpu":
        return DeviceMemory()
    item = ITEM_SIZE[model.compute_dtype]
    streamed = [model.stages[stage.stage].params for stage in stages if stage.weights != "gpu"]
    spans = 3 if model.tied_head and not model.head_is_cut else 2
    sums = spans * max(stage.params for stage in model.stages) * ITEM_SIZE[request.numerics.accumulate_dtype]
    lanes = square_lanes(max(tensor.numel for stage in model.stages for tensor in stage.tensors))
    targets = HEAD_BYTES_PER_TOKEN * request.numerics.tokens if model.head_is_cut else 0
    return DeviceMemory(
        homes=item * sum(model.stages[stage.stage].params for stage in stages if stage.weights == "gpu"),
        turns=item * WEIGHTS_ON_DEVICE * max(streamed, default=0),
        sums=sums + 8 * lanes,
        compute=targets + max(_pass_peak(model, request, stage) for stage in stages),
    )


def _pass_peak(model: ModelSpec, request: PlanRequest, stage: StagePlan) -> int:
    """Beside what a pass allocates for one micro-batch: that of its neighbours which crosses meanwhile. In backward the next
    one's boundary, gradient and kept outputs arrive, and the gradient of the one before is on its way back. In forward there is
    the input, which is not among what the stage allocates, and the next one's; input and output of the one before, and kept
    outputs of both, on their way back. A cut head has the sums of all three, and this one's and the next one's input."""
    spec = model.stages[stage.stage]
    one = request.numerics.batch_size <= request.numerics.micro_batch_size
    kept, boundary = kept_bytes(spec, stage.kept), micro_boundary(model, request)
    if spec.kind == "head" and model.head_is_cut:
        return spec.backward_peak + 2 * boundary + micro_sums(model, request) * (1 if one else 3)
    if one:
        return max(spec.backward_peak, spec.forward_peak + kept) + boundary
    return max(spec.backward_peak + 3 * boundary + kept, spec.forward_peak + 4 * boundary + 2 * kept)


def with_homes_on_device(
    model: ModelSpec, request: PlanRequest, schedule: Schedule, stages: tuple[StagePlan, ...]
) -> tuple[StagePlan, ...]:
    """Weights that rest in RAM stay on the device as well, once there, as far as it has room beside all else; those first
    that would go up most often. It takes nothing else: the plan is no slower for it. What the recipe pins stays so, and a
    device whose memory nobody knows keeps nothing."""
    if request.device == "cpu" or request.gpu_budget is None or request.weights is not None:
        return stages
    sizes = [ITEM_SIZE[model.compute_dtype] * stage.params for stage in model.stages]
    again = {owner: times for owner, times in uploads(model, schedule, stages).items() if times > 1}
    movable = [owner for owner in again if stages[owner].weights == "cpu"]
    order = sorted(movable, key=lambda owner: (-again[owner], sizes[owner], owner))
    streamed = max((size for owner, size in enumerate(sizes) if owner not in movable), default=0)
    beside = device_memory(model, request, stages)
    homes, left = sum(sizes[owner] for owner in order), request.gpu_budget - beside.sums - beside.compute
    count = len(order)  # of those that stay: where all do, the others' turns may be smaller
    while count and homes + WEIGHTS_ON_DEVICE * streamed > left:
        count -= 1
        homes -= sizes[order[count]]
        streamed = max(streamed, sizes[order[count]])
    chosen = set(order[:count])
    return tuple(replace(stage, weights="gpu") if stage.stage in chosen else stage for stage in stages)
