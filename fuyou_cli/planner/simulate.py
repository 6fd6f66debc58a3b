"""Seconds each resource is busy in one step. The step takes at least the busiest one's time.

On device cpu compute and update share the cores, so their seconds add up. On a device with memory of its own weights and
boundaries go to it and gradients and boundaries come back, always by way of the host's memory.
"""

from __future__ import annotations

from ..spec.hardware import HardwareProfile
from ..spec.model import ITEM_SIZE, ModelSpec, StageSpec
from ..spec.plan import Numerics, StagePlan
from .boundary import kept_bytes
from .schedule import Schedule

_MOMENTS_BYTES = 8  # per parameter: momentum and variance, float32
_WEIGHTS_ON_DEVICE = 2  # stages whose streamed weights a device holds at a time; they take turns
_IO_CPU_SECONDS_PER_BYTE = 0.1e-9  # kernel and checksum time; measured with `fuyou bench`, order of magnitude


def busy_seconds(
    model: ModelSpec,
    hardware: HardwareProfile,
    schedule: Schedule,
    *,
    stages: tuple[StagePlan, ...],
    numerics: Numerics,
    device: str,
) -> dict[str, float]:
    """Resource -> seconds. Resources whose rate is unknown (zero) are left out."""
    traffic = schedule.traffic
    both = traffic.read_total > 0 and traffic.written_total > 0
    read_rate = hardware.store_read_mixed if both else hardware.store_read
    write_rate = hardware.store_write_mixed if both else hardware.store_write
    seconds: dict[str, float] = {}
    compute = sum(visit.flops for visit in schedule.visits) / hardware.matmul_flops if hardware.matmul_flops else 0.0
    updated = model.stored_parameters * update_bytes(numerics)
    update = updated / hardware.adamw_bytes if hardware.adamw_bytes else 0.0
    moved = (traffic.read_total + traffic.written_total) * _IO_CPU_SECONDS_PER_BYTE
    if device == "cpu":
        seconds["cpu"] = compute + update + moved
    else:
        seconds["compute"] = compute
        seconds["update"] = update
        to_device, to_host = copied_bytes(model, schedule, stages=stages, numerics=numerics)
        if hardware.h2d:
            seconds["h2d"] = to_device / hardware.h2d
        if hardware.d2h:
            seconds["d2h"] = to_host / hardware.d2h
    if read_rate and traffic.read_total:
        seconds["ssd read"] = traffic.read_total / read_rate
    if write_rate and traffic.written_total:
        seconds["ssd write"] = traffic.written_total / write_rate
    return seconds


def update_bytes(numerics: Numerics) -> int:
    """Bytes of memory that one update reads and writes per parameter: weights, remainder and moments twice, the gradient
    once. 26 in bfloat16; 28 with float32 gradients, and in float32."""
    remainder = ITEM_SIZE["int16"] if numerics.compute_dtype == "bfloat16" else 0
    return 2 * (ITEM_SIZE[numerics.compute_dtype] + remainder + _MOMENTS_BYTES) + ITEM_SIZE[numerics.accumulate_dtype]


def copied_bytes(model: ModelSpec, schedule: Schedule, *, stages: tuple[StagePlan, ...], numerics: Numerics) -> tuple[int, int]:
    """Bytes of one step to a device with memory of its own, and back from it."""
    gradient = ITEM_SIZE[numerics.accumulate_dtype]
    params = [stage.params for stage in model.stages]
    shared = sum(params[stage.index] for stage in model.stages if model.has_two_users(stage.index))  # rest in between
    boundary = model.boundary_bytes_per_token * numerics.batch_size * numerics.max_seq_len
    moved = [_boundaries(model.stages[visit.stage], visit.phase) for visit in schedule.visits]
    micro_batches = -(-numerics.batch_size // numerics.micro_batch_size)
    kept = sum(kept_bytes(model.stages[stage.stage], stage.kept) for stage in stages) * micro_batches
    to_device = _uploaded_weights(model, schedule, stages) + gradient * shared + boundary * sum(into for into, _ in moved)
    to_host = gradient * (sum(params) + shared) + boundary * sum(back for _, back in moved)
    return to_device + kept, to_host + kept


def _uploaded_weights(model: ModelSpec, schedule: Schedule, stages: tuple[StagePlan, ...]) -> int:
    """Weights of a generation go up once where they rest on the device, else whenever two others were needed since."""
    item = ITEM_SIZE[model.compute_dtype]
    size = 0
    held: list[int] = []
    at_home: set[int] = set()
    for visit in schedule.visits:
        owner = visit.owner
        if owner is None or model.stages[owner].params == 0:
            continue
        known = owner in at_home or owner in held
        if not known:
            size += item * model.stages[owner].params
        if stages[owner].weights == "gpu":
            at_home.add(owner)
        else:
            others = [other for other in held if other != owner]
            held = [*others[1 - _WEIGHTS_ON_DEVICE :], owner]
    return size


def _boundaries(stage: StageSpec, phase: str) -> tuple[int, int]:
    """Boundaries of the whole batch that a visit takes to the device and brings back. The ids of an embedding are small;
    its pieces share one boundary, counted with the first."""
    if stage.kind == "embedding":
        if stage.vocabulary is not None and stage.vocabulary[0] > 0:
            return 0, 0
        return (0, 1) if phase == "forward" else (1, 0)
    # backward: the input and the output's gradient in, the input's gradient back
    return {"forward": (1, 1), "logits": (1, 0), "head": (1, 1), "backward": (2, 1)}[phase]
